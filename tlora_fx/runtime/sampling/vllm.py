"""Completions by a running vLLM server, which loads the adapters of a `GroupStep` from a folder.

Each version of an adapter has a name of its own: the server keeps prefixes of prompts by adapter,
and would take those of an earlier version for the new one's.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from tlora_fx.errors import GenerationError, SamplingServerError
from tlora_fx.runtime.adapters.files import write_adapter
from tlora_fx.runtime.generation import AdapterWeights
from tlora_fx.runtime.group_step import GroupStep
from tlora_fx.runtime.member import Member
from tlora_fx.runtime.sampling.draw import DrawOptions, key_of
from tlora_fx.runtime.sampling.sampler import (
    Completion,
    require_options,
    require_prompt,
    split_stop,
)
from tlora_fx.tracing.adapters import written_config

if TYPE_CHECKING:
    import httpx

#: Prompts that wait for an answer at a time; the server forms its batches of them.
_MAX_REQUESTS = 256


@dataclass(frozen=True, slots=True)
class _Version:
    """An adapter that the server has loaded."""

    name: str
    folder: Path
    digest: bytes


@dataclass(eq=False)
class VllmSampler:
    """Draws completions with the adapters that a `GroupStep` trains, by a vLLM server.

    A call writes the adapters that have changed, lets the server load them, and asks it. `close`
    unloads them; a sampler is a context manager.

    step      one process runs it; its base is the server's
    url       of the server
    folder    for adapters; the server reads it by the same path. By default a new one in /dev/shm,
              where there is one
    client    of httpx; by default one that waits for answers without a limit
    raises    GenerationError where several processes train, SamplingServerError without httpx
    """

    step: GroupStep
    url: str = "http://localhost:8000"
    folder: Path | str | None = None
    client: httpx.Client | None = None
    _versions: dict[str, _Version] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        try:
            import httpx
        except ImportError:
            raise SamplingServerError(
                "a vLLM server is asked by httpx", help="pip install 'tlora-fx[serve]'"
            ) from None
        if self.step.mesh.size > 1:
            raise GenerationError(
                "a sampler runs in one process", found=f"a plan of {self.step.mesh.size}"
            )
        if self.client is None:
            limits = httpx.Limits(max_connections=_MAX_REQUESTS)
            self.client = httpx.Client(timeout=httpx.Timeout(30, read=None), limits=limits)
        self._made_folder = self.folder is None
        if self.folder is None:
            memory = Path("/dev/shm")  # noqa: S108  (a folder of its own is made in it)
            self.folder = tempfile.mkdtemp(
                prefix="tlora-fx-", dir=memory if memory.is_dir() else None
            )

    def sample(
        self,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        *,
        max_new_tokens: int,
        n: int = 1,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[int | str] | None = None,
        seed: int | None = None,
    ) -> dict[str, list[list[Completion]]]:
        """Completions of each job's prompts; arguments and result are those of `Sampler.sample`.

        raises    StepMisuse, GenerationError as `Sampler.sample`; GenerationError for an adapter
                  that vLLM has no kind of; SamplingServerError where the server does not answer,
                  or refuses
        """
        require_options(DrawOptions(temperature, top_k, top_p), max_new_tokens, n)
        if self.step.runner is None:
            self.step.prepare()
        seed = int(torch.randint(2**63 - 1, ()).item()) if seed is None else seed
        tokens, strings = ((), ()) if stop is None else split_stop(stop)
        shared = {
            "max_tokens": max_new_tokens, "n": n, "temperature": temperature, "top_p": top_p,
            "top_k": top_k, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "stop": list(strings), "stop_token_ids": sorted(tokens),
            "include_stop_str_in_output": True, "ignore_eos": stop is not None, "logprobs": 0,
            "return_token_ids": True,
        }  # fmt: skip
        vocabulary = self.step.model.group.vocabulary
        asked: list[dict[str, Any]] = []
        for name, given in prompts.items():
            member, seen = self.step.member(name), Counter[tuple[int, ...]]()
            for prompt in given:
                ids = require_prompt(member.job, prompt, vocabulary)
                own = key_of(seed, ids, seen[ids]) % 2**63
                seen[ids] += 1
                asked.append({"model": name, "prompt": [*ids], "seed": own, **shared})
        loaded = {name: self._load(self.step.member(name)) for name in prompts if prompts[name]}
        for body in asked:
            body["model"] = loaded[body["model"]]
        with ThreadPoolExecutor(_MAX_REQUESTS) as pool:
            answers = iter([*pool.map(self._complete, asked)])
        return {name: [next(answers) for _ in given] for name, given in prompts.items()}

    def close(self) -> None:
        """Unload the adapters, and delete what was written."""
        for version in self._versions.values():
            self._unload(version)
        self._versions.clear()
        if self._made_folder:
            shutil.rmtree(Path(str(self.folder)), ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, member: Member) -> str:
        """The name under which the server has the job's adapter as it is now."""
        name, tensors = member.job.name, member.final_adapter()
        digest, before = _digest(tensors), self._versions.get(name)
        if before is not None and before.digest == digest:
            return before.name
        config = written_config(member.job, self.step.model.backbone)
        _require_kind(name, AdapterWeights(config, tensors))
        version = f"{name}-{uuid.uuid4().hex[:12]}"
        folder = Path(str(self.folder)).absolute() / version
        write_adapter(folder, tensors, config)
        try:
            self._post("load_lora_adapter", {"lora_name": version, "lora_path": str(folder)})
        except BaseException:
            shutil.rmtree(folder)
            raise
        self._versions[name] = _Version(version, folder, digest)
        if before is not None:
            self._unload(before)
        return version

    def _unload(self, version: _Version) -> None:
        self._post("unload_lora_adapter", {"lora_name": version.name})
        shutil.rmtree(version.folder)

    def _complete(self, body: dict[str, Any]) -> list[Completion]:
        """The completions of one prompt."""
        choices = self._post("completions", body).json()["choices"]
        completions = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            tokens, reason = choice.get("token_ids"), choice["finish_reason"]
            logprobs = (choice["logprobs"] or {}).get("token_logprobs")
            if tokens is None or logprobs is None or len(logprobs) != len(tokens):
                raise SamplingServerError(
                    "a vLLM server gave no log-probability to each token id",
                    url=self.url,
                    help="update it: it has to know `return_token_ids`",
                )
            if reason not in ("stop", "length"):
                raise SamplingServerError(
                    "a vLLM server did not finish a completion", url=self.url, found=reason
                )
            said = tuple(tokens), tuple(map(float, logprobs))
            completions.append(Completion(tuple(body["prompt"]), *said, reason))
        return completions

    def _post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        import httpx

        assert self.client is not None
        try:
            answer = self.client.post(f"{self.url.rstrip('/')}/v1/{path}", json=body)
        except httpx.HTTPError as error:
            raise SamplingServerError(
                "a vLLM server cannot be reached", url=self.url, reason=error
            ) from error
        if answer.is_error:
            raise SamplingServerError(
                f"a vLLM server refuses {path}",
                url=self.url,
                found=f"{answer.status_code}: {answer.text[:500]}",
            )
        return answer


def _require_kind(name: str, adapter: AdapterWeights) -> None:
    """Refuse an adapter that vLLM would not load, or load with another scale."""
    config: Any = adapter.config
    if not adapter.can_be_mixed or config.rank_pattern or config.alpha_pattern:
        raise GenerationError(
            "vLLM has no such adapters",
            job=name,
            expected="LoRA on linears, of one rank and alpha, without DoRA and trained modules",
            help="use tlora_fx.Sampler",
        )


def _digest(tensors: Mapping[str, Tensor]) -> bytes:
    """A hash of values under names."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        values = tensors[name].detach().cpu().contiguous().view(torch.uint8)
        digest.update(values.numpy().tobytes())
    return digest.digest()
