"""Read a job file: YAML that names one base, defaults, and jobs.

All mistakes of a file are reported in one `JobFileError`, each with its line and its job.
Relative paths start at the folder of the file.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from tlora_fx.config.base_spec import is_written_as_path
from tlora_fx.config.job import BaseSpec, Job
from tlora_fx.config.other_names import BASE_KEYS, ELSEWHERE, JOB_KEYS, LORA_KEYS, hint
from tlora_fx.config.overlay import laid_over
from tlora_fx.config.paths import is_pattern, is_there, with_home
from tlora_fx.config.sweep import MAX_JOBS, KeyPath, SweptJob, blocked_path, expand, nested
from tlora_fx.config.validation import Mistake, validated
from tlora_fx.errors import (
    JobFileError,
    JobFileMissingError,
    JobFileSyntaxError,
    RemoteCodeRefused,
    did_you_mean,
)

#: A job by its name, as it is written; None where it is wrong.
Named: TypeAlias = tuple[object, Job | None]

NODE_LIMIT = 100_000
#: A larger file is none that a person wrote, and would take long to refuse.
BYTES_LIMIT = 1 << 20
_TAG = "tag:yaml.org,2002:"

SHARED = ("adapter_dtype", "adapter_compute")
KEYS = ("base", *SHARED, "defaults", "jobs")
DATA_SUFFIXES = (
    ".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class JobFile:
    """The jobs of one file, in its order.

    path  the file, or None when made in Python
    """

    base: BaseSpec
    jobs: tuple[Job, ...]
    path: Path | None = None

    def __post_init__(self) -> None:
        counts = Counter(job.name for job in self.jobs)
        twice = [name for name, count in counts.items() if count > 1]
        if twice:
            raise JobFileError(
                f"{counts[twice[0]]} jobs are named '{twice[0]}'",
                file=self.path,
                help="each job needs a name of its own: it names the folder of its adapter",
            )


@dataclass(frozen=True, slots=True)
class _LocatedMistake:
    at: KeyPath
    line: int
    job: str | None
    mistake: Mistake


def load_job_file(path: str | Path, *, trust_remote_code: bool = False) -> JobFile:
    """Read and check a job file.

    trust_remote_code  whether a file that asks for it may run code that comes with its base, and
                       functions that its jobs name
    raises             JobFileMissingError, JobFileSyntaxError, JobFileError with all mistakes, or
                       RemoteCodeRefused
    """
    path = Path(path)
    source = read_yaml(path)
    reader = _JobFileReader(path, source, [])
    jobs = reader.jobs()
    if reader.mistakes or jobs is None:
        raise _error(path, reader.mistakes)
    require_trusted(jobs[0].base, path, trusted=trust_remote_code)
    require_trusted_functions(jobs, path, trusted=trust_remote_code)
    return JobFile(jobs[0].base, tuple(jobs), path)


def mistakes_of_text(text: str, path: Path) -> list[tuple[KeyPath, Mistake]]:
    """Mistakes in a job file that nobody has written yet, by the keys that lead to them.

    path    where it will stand: its relative paths start at that folder
    raises  JobFileSyntaxError
    """
    reader = _JobFileReader(path, _read_text(path, text), [])
    reader.jobs()
    return [(item.at, item.mistake) for item in reader.mistakes]


def yaml_text(value: object) -> str:
    """Plain values as YAML that `read_yaml` reads as the same values."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def require_trusted(base: BaseSpec, file: object, *, trusted: bool) -> None:
    """Refuse code that comes with a base, unless whoever started the command trusts it.

    raises  RemoteCodeRefused
    """
    if base.trust_remote_code and not trusted:
        raise RemoteCodeRefused(
            "the base would run code of its own",
            file=file,
            base=base.model or base.config,
            found="trust_remote_code: true",
            help="read that code; if you trust it, say --trust-remote-code on the command line",
        )


def require_trusted_functions(jobs: Sequence[Job], file: object, *, trusted: bool) -> None:
    """Refuse functions that jobs name, unless whoever started the command trusts them.

    raises  RemoteCodeRefused
    """
    for job in jobs:
        if job.compute_metrics is not None and not trusted:
            raise RemoteCodeRefused(
                "a job would run a function of its own",
                file=file,
                job=job.name,
                found=f"compute_metrics: {job.compute_metrics}",
                help="read that code; if you trust it, say --trust-remote-code on the command line",
            )


@dataclass(frozen=True, slots=True)
class _JobFileReader:
    path: Path
    source: Located
    mistakes: list[_LocatedMistake]

    def add(self, at: KeyPath, mistake: Mistake, job: str | None = None) -> None:
        self.mistakes.append(_LocatedMistake(at, self.source.line(at), job, mistake))

    def jobs(self) -> list[Job] | None:
        """All jobs, as far as they are right; None when the file has none."""
        top = self.source.value
        if not isinstance(top, dict):
            self.add((), Mistake((), "the job file is no mapping", help=f"keys: {', '.join(KEYS)}"))
            return None
        self._unknown_keys(top)
        base = self._base(top.get("base"))
        entries = top.get("jobs")
        defaults = {} if top.get("defaults") is None else top["defaults"]
        if not isinstance(defaults, dict):
            self.add(("defaults",), Mistake((), "'defaults' is no mapping"))
            defaults = {}
        if not isinstance(entries, list) or not entries:
            help = "begin each job with '- name: NAME', below 'jobs:'"
            self.add(("jobs",), Mistake((), "'jobs' is no list with at least one job", help=help))
            return None
        shared = {"base": base} | {key: top[key] for key in SHARED if key in top}
        jobs = [self._jobs_of(index, shared, defaults) for index in range(len(entries))]
        self._duplicates(jobs)
        self._too_many(jobs)
        return [job for several in jobs for _, job in several if job is not None] or None

    def _unknown_keys(self, top: dict[str, Any]) -> None:
        for key in top:
            if key in KEYS:
                continue
            help = did_you_mean(key, KEYS, f"known keys: {', '.join(KEYS)}")
            if key in (*Job.model_fields, "sweep"):
                help = "it belongs into a job, or into 'defaults'"
            elif key in JOB_KEYS:
                help = f"it is called '{JOB_KEYS[key]}' here, in a job or in 'defaults'"
            elif key in LORA_KEYS:
                help = (
                    f"it is called '{LORA_KEYS[key]}' here, under 'lora' in a job or in 'defaults'"
                )
            elif key in BASE_KEYS or key in ELSEWHERE:
                help = hint(key, BASE_KEYS) + " under 'base'" * (key in BASE_KEYS)
            self.add((key,), Mistake((key,), f"unknown key '{key}' beside 'jobs'", help=help))

    def _base(self, value: object) -> BaseSpec | None:
        if value is None:
            self.add(("base",), Mistake((), "'base' is missing", help="name the base model"))
            return None
        if isinstance(value, dict):
            value = dict(value)
            for key in ("model", "tokenizer"):
                value[key] = self._here(value.get(key), must_exist=True)
            value["config"] = self._here(value.get("config"))
        base, mistakes = validated(BaseSpec, value)
        for mistake in mistakes:
            self.add(("base", *mistake.loc), mistake)
        return base

    def _jobs_of(self, index: int, shared: dict[str, Any], defaults: dict[str, Any]) -> list[Named]:
        """The job of an entry, or those of its sweep; no job where it is wrong."""
        entry = self.source.value["jobs"][index]
        at: KeyPath = ("jobs", index)
        if not isinstance(entry, dict):
            self.add(at, Mistake((), f"job {index + 1} is no mapping"))
            return []
        name = entry.get("name")
        label = name if isinstance(name, str) else f"number {index + 1}"
        for key in ("base", *SHARED):
            if key in entry or key in defaults:
                where = (*at, key) if key in entry else ("defaults", key)
                help = "write it once, beside 'jobs': all jobs share it"
                self.add(where, Mistake((key,), f"'{key}' cannot differ by job", help=help), label)
        merged = laid_over(defaults, entry)
        sweep = merged.pop("sweep", None)
        if sweep is None or not isinstance(name, str):
            return [(name, self._job(index, merged, shared, label))]
        swept, mistakes = expand(name, sweep)
        for mistake in mistakes:
            self.add(self._location(index, ("sweep", *mistake.loc)), mistake, label)
        return [(each.name, self._swept_job(index, merged, each, shared, label)) for each in swept]

    def _swept_job(
        self, index: int, entry: dict[str, Any], swept: SweptJob, shared: dict[str, Any], label: str
    ) -> Job | None:
        values = nested(swept.values)
        blocked = blocked_path(entry, swept.values)
        if blocked is not None:
            path, at = blocked
            where = self._location(index, ("sweep", "parameters", path))
            what = f"'{path}' leads through '{at}', which is no mapping"
            self.add(where, Mistake((path,), what, help=f"sweep over '{at}' itself"), label)
            return None
        own = laid_over(entry, values) | swept.others | {"name": swept.name}
        return self._job(index, own, shared, label, swept.written)

    def _job(
        self,
        index: int,
        entry: dict[str, Any],
        shared: dict[str, Any],
        label: str,
        swept: Mapping[str, KeyPath] | None = None,
    ) -> Job | None:
        """Check one job.

        entry   with the defaults below it
        label   what it is called in messages
        swept   of a job of a sweep: fields by dotted path, each with its place below the sweep
        """
        merged = self._with_paths(entry) | shared
        if shared["base"] is None:
            # The base has its own mistakes by now; the job is checked against any base.
            merged["base"] = BaseSpec(model="-")
        job, mistakes = validated(Job, merged)
        for mistake in mistakes:
            self.add(self._location(index, _written(mistake.loc, swept or {})), mistake, label)
        return job

    def _location(self, index: int, loc: KeyPath) -> KeyPath:
        """Where a key of a job stands: in the job, beside 'jobs', or in the defaults."""
        if loc and loc[0] in SHARED:
            return loc
        for end in range(len(loc), 0, -1):
            for keys in _also_in_lists(loc[:end]):
                for path in (("jobs", index, *keys), ("defaults", *keys)):
                    if path in self.source.lines:
                        return path
        return ("jobs", index)

    def _duplicates(self, jobs: Sequence[Sequence[Named]]) -> None:
        """Add a mistake for each name that is taken.

        jobs   of each entry
        """
        first: dict[str, int] = {}
        for index, several in enumerate(jobs):
            for name, _ in several:
                if not isinstance(name, str):
                    continue
                if name in first:
                    line = self.source.line(("jobs", first[name], "name"))
                    what = f"the name '{name}' is taken by the job in line {line}"
                    help = "give each job a name of its own: its folder has that name"
                    self.add(("jobs", index, "name"), Mistake(("name",), what, help=help), name)
                first.setdefault(name, index)

    def _too_many(self, jobs: Sequence[Sequence[Named]]) -> None:
        swept = sum(len(several) for several in jobs if len(several) > 1)
        if swept > MAX_JOBS:
            what, help = "the sweeps make too many jobs", "put some of them into another file"
            self.add(("jobs",), Mistake((), what, f"at most {MAX_JOBS}", str(swept), help))

    def _with_paths(self, job: dict[str, Any]) -> dict[str, Any]:
        job = dict(job)
        if "adapter" in job:
            job["adapter"] = self._here(job["adapter"])
        for key in ("data", "eval_data"):
            if key in job:
                job[key] = self._data_here(job[key])
        file, colon, function = str(job.get("compute_metrics", "")).rpartition(":")
        if file.endswith(".py"):
            job["compute_metrics"] = f"{self._here(file)}{colon}{function}"
        return job

    def _data_here(self, data: object) -> object:
        if isinstance(data, list):
            return [self._data_here(each) for each in data]
        if not isinstance(data, dict):
            return data
        changed = {"path": self._here(data["path"], must_exist=True)} if "path" in data else {}
        return data | changed | ({"more": self._data_here(data["more"])} if "more" in data else {})

    def _here(self, value: object, *, must_exist: bool = False) -> object:
        """A relative path as seen from the file's folder.

        must_exist  leave text alone that may be a hub id: no such file, and not written as a path
        """
        if not isinstance(value, str) or not value:
            return value
        path = self.path.absolute().parent / with_home(value)
        written = is_written_as_path(value) or value.endswith(DATA_SUFFIXES) or is_pattern(value)
        return str(path) if written or not must_exist or is_there(path) else value


def _written(loc: KeyPath, swept: Mapping[str, KeyPath]) -> KeyPath:
    """Where a user wrote what a job has at `loc`: in the sweep, where that gave it."""
    for path, place in swept.items():
        keys = tuple(path.split("."))
        if loc[: len(keys)] == keys:
            return ("sweep", *place, *loc[len(keys) :])
    return loc


def _also_in_lists(loc: KeyPath) -> tuple[KeyPath, ...]:
    """Where a key of a job may be written: of `data` in a list of data sets, or outside of one."""
    if len(loc) < 2 or loc[0] != "data":
        return (loc,)
    if isinstance(loc[1], int):
        return (loc, ("data", *loc[2:])) if loc[2:] else (loc,)
    return (loc, ("data", 0, *loc[1:]))


def _error(path: Path, located: list[_LocatedMistake]) -> JobFileError:
    """One error for all mistakes; a mistake in the defaults is told once, not once a job."""
    jobs: dict[tuple[int, Mistake], list[str]] = {}
    for item in sorted(located, key=lambda item: item.line):
        # Defaults stand in several jobs, and in several data sets of one.
        mistake = replace(item.mistake, loc=())
        jobs.setdefault((item.line, mistake), []).extend([item.job] if item.job else [])
    rows = [
        (line, mistake, ", ".join(dict.fromkeys(names))) for (line, mistake), names in jobs.items()
    ]
    if len(rows) == 1:
        [(line, mistake, names)] = rows
        return JobFileError(
            mistake.what,
            file=f"{path}:{line}",
            job=names or None,
            expected=mistake.expected or None,
            found=mistake.found or None,
            help=mistake.help,
        )
    lines = [
        f"line {line}" + (f", job {names}" if names else "") + f": {mistake.line()}"
        for line, mistake, names in rows
    ]
    return JobFileError(f"{len(rows)} mistakes", file=path, mistakes="\n".join(lines))


#: What PyYAML says of `---` below a document.
_SECOND_DOCUMENT = "but found another document"


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2.

    Stricter than PyYAML's safe loader: a key stands once, no tag builds an object, an alias cannot
    hold itself, and a file cannot unfold into millions of nodes. Scalars follow YAML 1.2: `2e-4` is
    a number; `yes`, `no`, `1:30` and dates are text.
    """

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML declares it, add_implicit_resolver fills it)


_SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    "merge": (r"<<", "<"),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _firsts = [*_first, ""] if _name == "null" else list(_first)
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(f"^(?:{_pattern})$"), _firsts)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which also quotes text that YAML 1.2 reads as a number."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (as above)
        first: [
            *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
            *_Loader.yaml_implicit_resolvers.get(first, []),
        ]
        for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: object) -> bool:
        """Write each value out: a person reads it."""
        return True


@dataclass(frozen=True, slots=True)
class Located:
    """Contents of a YAML file with their positions.

    value  mappings, lists, texts, numbers, true, false and null
    lines  the line, from 1, of what a path of keys and list indices leads to
    """

    value: Any
    lines: Mapping[KeyPath, int]

    def line(self, path: KeyPath) -> int:
        """The line of `path`, or of the nearest thing that holds it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def _near(path: Path) -> str:
    """Help for a job file that cannot be read: the one beside it that was meant."""
    otherwise = "name a YAML file with the keys base and jobs"
    try:
        beside = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml")]
    except OSError:
        return otherwise
    return otherwise if path.name in beside else did_you_mean(path.name, beside, otherwise)


def read_bounded(path: Path) -> bytes:
    """The bytes of a job file, without waiting for one and without filling the memory.

    raises  JobFileMissingError, JobFileSyntaxError
    """
    try:
        # Looked at before it is opened too: opening a device may do something.
        _require_regular(path, path.stat())
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            _require_regular(path, os.fstat(file.fileno()))
            content = file.read(BYTES_LIMIT + 1)
    except OSError as error:
        reason = error.strerror or error
        raise JobFileMissingError(
            "the job file cannot be read",
            file=path,
            found=reason,
            help=_near(path),
        ) from None
    if len(content) > BYTES_LIMIT:
        raise _too_large(path, f"more than {BYTES_LIMIT}")
    return content


def _require_regular(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise JobFileMissingError(
            "the job file is no regular file",
            file=path,
            help="write the jobs into a file: several processes read it, and a later start again",
        )
    if status.st_size > BYTES_LIMIT:
        raise _too_large(path, status.st_size)


def _too_large(path: Path, found: object) -> JobFileSyntaxError:
    return JobFileSyntaxError(
        "the job file is too large",
        file=path,
        expected=f"at most {BYTES_LIMIT} bytes",
        found=found,
        help="put its jobs into several files",
    )


def read_yaml(path: Path) -> Located:
    """Read one YAML document from a file; raises JobFileMissingError, JobFileSyntaxError."""
    try:
        text = read_bounded(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        is_utf16 = error.object.startswith((b"\xff\xfe", b"\xfe\xff"))
        name = f"iconv -f {'utf-16' if is_utf16 else 'ENCODING'} -t utf-8 {path.name}"
        raise JobFileSyntaxError(
            "the job file is not UTF-8",
            file=path,
            found="UTF-16" if is_utf16 else f"a wrong byte at {error.start}",
            help=f"save it as UTF-8: {name} > utf8-{path.name}",
        ) from None
    try:
        return _read_text(path, text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else path
        what = f"the job file is no YAML: {error.problem or error.context}"
        help = "look at the indentation, the colons and the quotes before that place"
        if isinstance(error, yaml.composer.ComposerError) and error.problem == _SECOND_DOCUMENT:
            what = "the job file holds more than one document"
            help = "delete the line of '---', or what stands before or after it"
        raise JobFileSyntaxError(what, file=where, help=help) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise JobFileSyntaxError(
            "the job file is no YAML: it has a character that is not allowed",
            file=f"{path}:{line}",
            found=repr(text[error.position]),
            help="delete it",
        ) from None
    except yaml.YAMLError as error:
        raise JobFileSyntaxError("the job file is no YAML", file=path, found=error) from None
    except RecursionError:
        raise JobFileSyntaxError("the job file is nested too deeply", file=path) from None


def _read_text(path: Path, text: str) -> Located:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise JobFileSyntaxError(
                "the job file is empty",
                file=path,
                expected="the keys base and jobs",
                help="begin with base: {model: ...} and jobs: [{name: ..., data: {path: ...}}]",
            )
        walk = _YamlWalk(path, loader)
        return Located(walk.value(node, ()), walk.lines)
    finally:
        loader.dispose()


@dataclass(slots=True)
class _YamlWalk:
    path: Path
    loader: _Loader
    lines: dict[KeyPath, int] = field(default_factory=dict)
    open: set[int] = field(default_factory=set)
    nodes: int = 0

    def value(self, node: yaml.Node, at: KeyPath) -> Any:
        self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise self.error(f"the job file unfolds into more than {NODE_LIMIT} values", node)
        if id(node) in self.open:
            raise self.error("an alias stands inside what it names", node)
        if not node.tag.startswith(_TAG):
            raise self.error(f"the tag '{node.tag}' is not read", node)
        self.lines.setdefault(at, node.start_mark.line + 1)
        self.open.add(id(node))
        try:
            return self._plain(node, at)
        finally:
            self.open.discard(id(node))

    def _plain(self, node: yaml.Node, at: KeyPath) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.value(item, (*at, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and kind in ("null", "bool", "float", "str"):
            return self._scalar(kind, node)
        if isinstance(node, yaml.ScalarNode) and kind == "int":
            return self._whole(node)
        raise self.error(f"the tag '!!{kind}' is not read here", node)

    def _scalar(self, kind: str, node: yaml.ScalarNode) -> Any:
        try:
            return getattr(self.loader, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError):
            raise self.error(f"'{node.value}' is no {kind}", node) from None

    def _whole(self, node: yaml.ScalarNode) -> int:
        # PyYAML reads 010 as eight and 1:30 as ninety.
        try:
            return int(node.value, 16 if node.value.startswith("0x") else 10)
        except ValueError:
            raise self.error("a whole number cannot be read", node) from None

    def _mapping(self, node: yaml.MappingNode, at: KeyPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                several = isinstance(value_node, yaml.SequenceNode)
                merged.extend(value_node.value if several else [value_node])
                continue
            key = self._key(key_node)
            if key in mapping:
                first = self.lines[(*at, key)]
                raise self.error(f"the key '{key}' stands twice, first in line {first}", key_node)
            self.lines[(*at, key)] = key_node.start_mark.line + 1
            mapping[key] = self.value(value_node, (*at, key))
        for other in merged:
            # What stands here wins over what is merged in, and so does its line.
            extra = self.value(other, at)
            if not isinstance(extra, dict):
                raise self.error("'<<' merges mappings only", other)
            mapping = extra | mapping
        return mapping

    def _key(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error("a key is no plain text", node)
        return str(node.value)

    def error(self, what: str, node: yaml.Node) -> JobFileSyntaxError:
        return JobFileSyntaxError(what, file=f"{self.path}:{node.start_mark.line + 1}")
