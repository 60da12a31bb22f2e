-- The workflow journal. Times are milliseconds since the epoch.
CREATE TABLE executions (
    id          INTEGER PRIMARY KEY,       -- rises in order of starts
    arn         TEXT NOT NULL UNIQUE,
    name        TEXT NOT NULL,
    machine_arn TEXT NOT NULL,
    machine     BLOB NOT NULL,             -- digest, see machines
    version_arn TEXT,
    alias_arn   TEXT,
    map_run_arn TEXT,
    birth       TEXT NOT NULL,             -- JSON: seed, trace header, parent
    input       TEXT NOT NULL,             -- JSON text, or {"part": digest} marked by input_part
    input_part  INTEGER NOT NULL,
    start_ms    INTEGER NOT NULL,
    status      TEXT NOT NULL,
    stop_ms     INTEGER,
    output      TEXT,
    output_part INTEGER NOT NULL DEFAULT 0,
    error       TEXT,
    cause       TEXT,
    redrive_count INTEGER NOT NULL DEFAULT 0,
    redrive_ms  INTEGER
);
CREATE INDEX executions_of_machine ON executions (machine_arn, id);
CREATE INDEX executions_of_version ON executions (version_arn, id) WHERE version_arn IS NOT NULL;
CREATE INDEX executions_of_alias   ON executions (alias_arn, id)   WHERE alias_arn IS NOT NULL;
CREATE INDEX executions_of_map_run ON executions (map_run_arn, id) WHERE map_run_arn IS NOT NULL;
CREATE INDEX executions_open       ON executions (id)              WHERE status = 'RUNNING';

-- The external events of executions. Rows are in order of arrival across all executions, so that a group of them
-- fills whole pages; in a table ordered by execution, a row larger than a quarter page would take a page of its own.
CREATE TABLE records (
    id        INTEGER PRIMARY KEY,
    execution INTEGER NOT NULL,
    seq       INTEGER NOT NULL,
    at_ms     INTEGER NOT NULL,
    body      BLOB NOT NULL
);
CREATE UNIQUE INDEX records_of_execution ON records (execution, seq);

-- The state of an open execution after one of its records, from which it is resumed.
CREATE TABLE checkpoints (execution INTEGER PRIMARY KEY, seq INTEGER NOT NULL, body BLOB NOT NULL);

-- Payloads and state machines, stored once per digest.
CREATE TABLE parts    (digest BLOB PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE machines (digest BLOB PRIMARY KEY, body BLOB NOT NULL);

CREATE TABLE map_runs (arn TEXT PRIMARY KEY, execution INTEGER NOT NULL);

-- The payloads of executions: a payload is deleted with the last execution that has it.
CREATE TABLE part_uses (
    execution INTEGER NOT NULL,
    digest    BLOB NOT NULL,
    PRIMARY KEY (execution, digest)
) WITHOUT ROWID;
CREATE INDEX uses_of_part ON part_uses (digest);
CREATE INDEX map_runs_of_execution ON map_runs (execution);
CREATE INDEX executions_ended ON executions (stop_ms) WHERE stop_ms IS NOT NULL;
CREATE INDEX executions_by_definition ON executions (machine);

-- The artifacts that executions reference (`sha256:…` in their data): they are kept while they may be needed.
CREATE TABLE artifacts_of_executions (
    artifact  BLOB NOT NULL,
    execution INTEGER NOT NULL,
    PRIMARY KEY (artifact, execution)
) WITHOUT ROWID;
CREATE INDEX artifacts_by_execution ON artifacts_of_executions (execution);
CREATE TABLE artifacts_of_machines (
    artifact BLOB NOT NULL,
    machine  BLOB NOT NULL,
    PRIMARY KEY (artifact, machine)
) WITHOUT ROWID;
