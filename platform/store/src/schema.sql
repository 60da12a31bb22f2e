-- The whole schema. `PRAGMA user_version` is 1, `PRAGMA application_id` is 0x4d61794f.
-- Look inside with: sqlite3 FILE "SELECT resource, namespace, name, modified, value FROM objects"

-- `created` is the number of the write that created the object, and being unique it is the row's
-- address: an update or a delete touches one tree. That keys are unique is the writer's business (it judges
-- every write by its index) and is checked when the file is opened.
CREATE TABLE objects (
    created   INTEGER PRIMARY KEY,
    modified  INTEGER NOT NULL,
    resource  TEXT NOT NULL,
    namespace TEXT NOT NULL,
    name      TEXT NOT NULL,
    value     BLOB NOT NULL,
    -- CRC-32 of all of the above: SQLite notices damage to its own structure only.
    checksum  INTEGER NOT NULL
) STRICT;

-- One row: the newest revision. It outlives the object it belonged to.
CREATE TABLE revision (newest INTEGER NOT NULL) STRICT;
INSERT INTO revision VALUES (0);
