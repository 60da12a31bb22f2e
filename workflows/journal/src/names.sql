-- Which artifacts what is written names (`sha256:…` in its text): they stay while it may be needed.
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
