//! Writes changes to SQLite.

use mayfly_workflows_language::arn::{MapRunArn, StateMachineArn};
use mayfly_workflows_language::execution::{Digest, Payload};

use rusqlite::{Connection, OptionalExtension as _, params};

use super::names;
use super::read::signed;
use super::sqlite::FORMAT;
use super::{Batch, ExecutionRow, JournalChange};
use mayfly_workflows_language::execution::RunStatus;

/// Writes batches in one transaction.
pub(super) fn commit(db: &Connection, group: &[Batch]) -> rusqlite::Result<()> {
    // Like `Connection::transaction`, which parses its two statements each time.
    db.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
    let written = write_all(db, group).and_then(|()| db.prepare_cached("COMMIT")?.execute([]).map(drop));
    if written.is_err() && !db.is_autocommit() {
        db.execute_batch("ROLLBACK")?;
    }
    written
}

/// Writes a value that is already in the file, to check whether it is writable.
pub(super) fn attempt(db: &Connection) -> rusqlite::Result<()> {
    db.pragma_update(None, "user_version", FORMAT.version)
}

fn write_all(db: &Connection, group: &[Batch]) -> rusqlite::Result<()> {
    for batch in group {
        let execution = batch.changes.iter().find_map(execution_of);
        for change in &batch.changes {
            apply(db, change, execution)?;
        }
    }
    Ok(())
}

/// The execution of a batch; all changes of a batch belong to one execution.
pub(super) fn execution_of(change: &JournalChange) -> Option<u64> {
    match change {
        JournalChange::Start(row) => Some(row.id),
        JournalChange::Record { execution, .. } | JournalChange::Outcome { execution, .. } => {
            Some(*execution)
        }
        _ => None,
    }
}

/// Deletes an execution, unless it was redriven meanwhile, with its state machine and those payloads that nothing else
/// references. SQLite reuses the space.
fn remove(db: &Connection, execution: u64) -> rusqlite::Result<()> {
    let id = signed(execution);
    let ended = "SELECT machine FROM executions WHERE id = ?1 AND status <> 'RUNNING'";
    let machine = db.prepare_cached(ended)?.query_row([id], |row| row.get::<_, Vec<u8>>(0)).optional()?;
    let Some(machine) = machine else { return Ok(()) };
    db.prepare_cached(
        "DELETE FROM parts WHERE digest IN (SELECT digest FROM part_uses WHERE execution = ?1) AND NOT EXISTS \
         (SELECT 1 FROM part_uses u WHERE u.digest = parts.digest AND u.execution <> ?1)",
    )?
    .execute([id])?;
    for table in ["part_uses", "records", "checkpoints", "map_runs", "artifacts_of_executions"] {
        db.prepare_cached(&format!("DELETE FROM {table} WHERE execution = ?1"))?.execute([id])?;
    }
    db.prepare_cached("DELETE FROM executions WHERE id = ?1")?.execute([id])?;
    let unused =
        "DELETE FROM machines WHERE digest = ?1 AND NOT EXISTS (SELECT 1 FROM executions WHERE machine = ?1)";
    if db.prepare_cached(unused)?.execute([&machine])? > 0 {
        db.prepare_cached("DELETE FROM artifacts_of_machines WHERE machine = ?1")?.execute([&machine])?;
    }
    Ok(())
}

fn column(payload: &Payload) -> (std::borrow::Cow<'_, str>, bool) {
    match payload {
        Payload::Inline(json) => (std::borrow::Cow::Borrowed(&**json.text()), false),
        Payload::Part { part } => (std::borrow::Cow::Owned(part.hex()), true),
    }
}

fn apply(db: &Connection, change: &JournalChange, execution: Option<u64>) -> rusqlite::Result<()> {
    match change {
        JournalChange::Machine { digest, body } => {
            db.prepare_cached("INSERT OR IGNORE INTO machines VALUES (?1, ?2)")?
                .execute(params![&digest.as_bytes()[..], &body[..]])?;
            names::note_machine(db, digest, body)?;
        }
        JournalChange::Part { digest, text } => {
            db.prepare_cached("INSERT OR IGNORE INTO parts VALUES (?1, ?2)")?
                .execute(params![&digest.as_bytes()[..], &text[..]])?;
            use_part(db, digest, execution)?;
            if let Some(execution) = execution {
                names::note(db, execution, text.as_bytes())?;
            }
        }
        JournalChange::Start(row) => {
            insert_execution(db, row)?;
            names::note_start(db, row)?;
        }
        JournalChange::Record { execution, row } => {
            db.prepare_cached("INSERT INTO records (execution, seq, at_ms, body) VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![signed(*execution), signed(row.seq), row.at_ms, row.body])?;
            names::note(db, *execution, &row.body)?;
        }
        JournalChange::Outcome { execution, row } => {
            if row.status != RunStatus::Running {
                db.prepare_cached("DELETE FROM checkpoints WHERE execution = ?1")?
                    .execute([signed(*execution)])?;
            }
            let output = row.output.as_ref().map(column);
            db.prepare_cached(
                "UPDATE executions SET status = ?2, stop_ms = ?3, output = ?4, output_part = ?5, error = ?6, \
                 cause = ?7, redrive_count = ?8, redrive_ms = ?9 WHERE id = ?1",
            )?
            .execute(params![
                signed(*execution),
                row.status.as_str(),
                row.stop_ms,
                output.as_ref().map(|(text, _)| text.as_ref()),
                output.as_ref().is_some_and(|(_, is_part)| *is_part),
                row.error,
                row.cause,
                row.redrive_count,
                row.redrive_ms,
            ])?;
        }
        JournalChange::Checkpoint { execution, seq, body } => {
            db.prepare_cached("INSERT OR REPLACE INTO checkpoints VALUES (?1, ?2, ?3)")?.execute(params![
                signed(*execution),
                signed(*seq),
                body
            ])?;
        }
        JournalChange::Remove { execution } => remove(db, *execution)?,
        JournalChange::MapRun { arn, execution } => {
            db.prepare_cached("INSERT OR IGNORE INTO map_runs VALUES (?1, ?2)")?
                .execute(params![arn.as_str(), signed(*execution)])?;
        }
    }
    Ok(())
}

fn insert_execution(db: &Connection, row: &ExecutionRow) -> rusqlite::Result<()> {
    let birth = serde_json::to_string(&row.birth)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
    let (input, input_part) = column(&row.input);
    db.prepare_cached(
        "INSERT INTO executions (id, arn, name, machine_arn, machine, version_arn, alias_arn, map_run_arn, birth, \
         input, input_part, start_ms, status) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
    )?
    .execute(params![
        signed(row.id),
        row.arn.as_str(),
        row.name,
        row.machine_arn.as_str(),
        &row.machine.as_bytes()[..],
        row.version_arn.as_ref().map(StateMachineArn::as_str),
        row.alias_arn.as_ref().map(StateMachineArn::as_str),
        row.map_run_arn.as_ref().map(MapRunArn::as_str),
        birth,
        input,
        input_part,
        row.start_ms,
        row.outcome.status.as_str(),
    ])?;
    Ok(())
}

fn use_part(db: &Connection, digest: &Digest, execution: Option<u64>) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT OR IGNORE INTO part_uses VALUES (?1, ?2)")?
        .execute(params![signed(execution.unwrap_or(0)), &digest.as_bytes()[..]])?;
    Ok(())
}
