BEGIN TRANSACTION;
CREATE TABLE actions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, user TEXT NOT NULL, verb TEXT NOT NULL,
    what TEXT NOT NULL);
INSERT INTO "actions" VALUES(1,1795000000.0,'alice','token','alice');
INSERT INTO "actions" VALUES(2,1795000000.0,'alice','submit','alice.done, alice.half, alice.new');
CREATE TABLE decisions (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, groups TEXT NOT NULL, waiting TEXT NOT NULL);
CREATE TABLE epochs (
    epoch INTEGER PRIMARY KEY, jobs TEXT NOT NULL, gpus TEXT NOT NULL, layout TEXT NOT NULL,
    seconds REAL NOT NULL, launched REAL NOT NULL, started REAL, ended REAL,
    how TEXT NOT NULL DEFAULT '');
INSERT INTO "epochs" VALUES(1,'["alice.done", "alice.half"]','[0]','',0.0,2.0,NULL,62.0,'drained');
INSERT INTO "epochs" VALUES(2,'["alice.half"]','[0]','',0.0,70.0,NULL,NULL,'');
CREATE TABLE events (
    number INTEGER PRIMARY KEY, time REAL NOT NULL, kind TEXT NOT NULL, jobs TEXT NOT NULL,
    text TEXT NOT NULL);
INSERT INTO "events" VALUES(1,1795000001.0,'submitted','["alice.done"]','is in the queue');
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "facts" VALUES('format','1');
INSERT INTO "facts" VALUES('started','1795000000.0');
CREATE TABLE files (path TEXT PRIMARY KEY, sha256 TEXT NOT NULL, told TEXT NOT NULL);
CREATE TABLE jobs (
    place INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, request TEXT NOT NULL,
    spec TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '',
    steps REAL NOT NULL DEFAULT 0, epoch INTEGER, path TEXT NOT NULL DEFAULT '',
    credit REAL NOT NULL DEFAULT 0, first_started REAL, ended REAL);
INSERT INTO "jobs" VALUES(1,'alice.done','{"name":"alice.done","base":"base","demand":{"jobs":1,"samples":4,"tokens":99.5,"squares":0.0,"targets":0.0,"adapters":0.0,"rank":0.0,"site_tokens":0.0,"rank_tokens":0.0,"tensors":0.0,"parameters":0.0,"launched":0.0},"gpus":1,"steps":10,"submitted":1.0,"max_slowdown":1.5,"deadline":null,"max_slowdown_opt_in":0.0,"longest":0}','{"name": "alice.done"}','done','',10.0,1,'epoch-1',0.0,2.0,60.0);
INSERT INTO "jobs" VALUES(2,'alice.half','{"name":"alice.half","base":"base","demand":{"jobs":1,"samples":4,"tokens":99.5,"squares":0.0,"targets":0.0,"adapters":0.0,"rank":0.0,"site_tokens":0.0,"rank_tokens":0.0,"tensors":0.0,"parameters":0.0,"launched":0.0},"gpus":1,"steps":10,"submitted":1.0,"max_slowdown":1.5,"deadline":null,"max_slowdown_opt_in":0.0,"longest":0}','{"name": "alice.half"}','running','',6.0,1,'epoch-1',0.0,2.0,NULL);
INSERT INTO "jobs" VALUES(3,'alice.new','{"name":"alice.new","base":"base","demand":{"jobs":1,"samples":4,"tokens":99.5,"squares":0.0,"targets":0.0,"adapters":0.0,"rank":0.0,"site_tokens":0.0,"rank_tokens":0.0,"tensors":0.0,"parameters":0.0,"launched":0.0},"gpus":1,"steps":10,"submitted":1.0,"max_slowdown":1.5,"deadline":null,"max_slowdown_opt_in":0.0,"longest":0}','{"name": "alice.new"}','queued','',0.0,NULL,'',0.0,NULL,NULL);
CREATE TABLE origins (name TEXT PRIMARY KEY, path TEXT NOT NULL);
INSERT INTO "origins" VALUES('alice.done','000001.yaml');
INSERT INTO "origins" VALUES('alice.half','000001.yaml');
INSERT INTO "origins" VALUES('alice.new','000001.yaml');
CREATE TABLE owned (
    name TEXT PRIMARY KEY COLLATE NOCASE, user TEXT NOT NULL, submission INTEGER NOT NULL,
    priority INTEGER NOT NULL, wanted TEXT NOT NULL DEFAULT 'run');
INSERT INTO "owned" VALUES('alice.done','alice',1,0,'run');
INSERT INTO "owned" VALUES('alice.half','alice',1,0,'run');
INSERT INTO "owned" VALUES('alice.new','alice',1,0,'run');
CREATE TABLE submissions (
    number INTEGER PRIMARY KEY, user TEXT NOT NULL, key TEXT NOT NULL, sha256 TEXT NOT NULL,
    time REAL NOT NULL, folder TEXT NOT NULL, document TEXT NOT NULL, UNIQUE (user, key));
INSERT INTO "submissions" VALUES(1,'alice','key','0000000000000000000000000000000000000000000000000000000000000000',1795000000.0,'folder','{"base": {"model": "some/base"}, "jobs": [{"name": "alice.done", "lora": {"r": 4}, "data": {"path": "a/b"}, "max_steps": 10}, {"name": "alice.half", "lora": {"r": 8}, "data": {"path": "a/b"}, "max_steps": 10}, {"name": "alice.new", "lora": {"r": 16}, "data": {"path": "a/b"}, "max_steps": 10}]}');
CREATE TABLE tokens (
    sha256 TEXT PRIMARY KEY, user TEXT NOT NULL, made REAL NOT NULL);
INSERT INTO "tokens" VALUES('b98a4e0a9d56c46e4193c03cbe221a10968c363b1ce344ea5e498e2dcf76b539','alice',1795000000.0);
CREATE TABLE users (
    name TEXT PRIMARY KEY, admin INTEGER NOT NULL, jobs INTEGER, gpu_hours REAL,
    priority INTEGER NOT NULL);
INSERT INTO "users" VALUES('alice',0,20,100.0,5);
COMMIT;
