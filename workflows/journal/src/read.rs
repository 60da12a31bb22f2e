//! Reads rows from SQLite.

use mayfly_workflows_language::arn::{ExecutionArn, MapRunArn, StateMachineArn};
use mayfly_workflows_language::execution::{Digest, Payload};
use rusqlite::{Connection, OptionalExtension as _, Row, params_from_iter, types::Value as Sql};

use super::{
    Birth, ExecutionOwner, ExecutionRow, JournalError, ListRows, OutcomeRow, RecordRow, StoredExecution,
};
use mayfly_workflows_language::execution::RunStatus;

const COLUMNS: &str = "id, arn, name, machine_arn, machine, version_arn, alias_arn, map_run_arn, birth, input, \
     input_part, start_ms, status, stop_ms, output, output_part, error, cause, redrive_count, redrive_ms";

fn damaged(reason: impl ToString) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, reason.to_string().into())
}

fn digest(bytes: &[u8]) -> rusqlite::Result<Digest> {
    <[u8; 32]>::try_from(bytes).map(Digest::from_bytes).map_err(|_| damaged("a digest has 32 bytes"))
}

fn payload(text: String, is_part: bool) -> rusqlite::Result<Payload> {
    if !is_part {
        return Ok(Payload::Inline(text.into()));
    }
    let mut bytes = [0; 32];
    hex::decode_to_slice(&text, &mut bytes).map_err(damaged)?;
    Ok(Payload::Part { part: Digest::from_bytes(bytes) })
}

fn execution_row(row: &Row<'_>) -> rusqlite::Result<ExecutionRow> {
    let machine: Vec<u8> = row.get(4)?;
    let birth: String = row.get(8)?;
    let birth: Birth = serde_json::from_str(&birth).map_err(damaged)?;
    let status: String = row.get(12)?;
    let output: Option<String> = row.get(14)?;
    let output_part: bool = row.get(15)?;
    Ok(ExecutionRow {
        id: unsigned(row.get(0)?)?,
        arn: ExecutionArn::from_trusted(row.get::<_, String>(1)?),
        name: row.get(2)?,
        machine_arn: StateMachineArn::from_trusted(row.get::<_, String>(3)?),
        machine: digest(&machine)?,
        version_arn: row.get::<_, Option<String>>(5)?.map(StateMachineArn::from_trusted),
        alias_arn: row.get::<_, Option<String>>(6)?.map(StateMachineArn::from_trusted),
        map_run_arn: row.get::<_, Option<String>>(7)?.map(MapRunArn::from_trusted),
        birth,
        input: payload(row.get(9)?, row.get(10)?)?,
        start_ms: row.get(11)?,
        outcome: OutcomeRow {
            status: RunStatus::parse(&status).ok_or_else(|| damaged("unknown status"))?,
            stop_ms: row.get(13)?,
            output: output.map(|text| payload(text, output_part)).transpose()?,
            error: row.get(16)?,
            cause: row.get(17)?,
            redrive_count: row.get(18)?,
            redrive_ms: row.get(19)?,
        },
    })
}

fn unsigned(number: i64) -> rusqlite::Result<u64> {
    u64::try_from(number).map_err(damaged)
}

/// SQLite's integers are signed; our numbers stay far below the limit.
pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn last_execution(db: &Connection) -> Result<u64, JournalError> {
    let last: Option<i64> = db.query_row("SELECT max(id) FROM executions", [], |row| row.get(0))?;
    Ok(unsigned(last.unwrap_or(0))?)
}

pub(super) fn execution(db: &Connection, id: u64) -> Result<Option<ExecutionRow>, JournalError> {
    let mut statement = db.prepare_cached(&format!("SELECT {COLUMNS} FROM executions WHERE id = ?1"))?;
    Ok(statement.query_row([signed(id)], execution_row).optional()?)
}

pub(super) fn execution_by_arn(
    db: &Connection,
    arn: &ExecutionArn,
) -> Result<Option<ExecutionRow>, JournalError> {
    let mut statement = db.prepare_cached(&format!("SELECT {COLUMNS} FROM executions WHERE arn = ?1"))?;
    Ok(statement.query_row([arn.as_str()], execution_row).optional()?)
}

pub(super) fn records(db: &Connection, id: u64, after: u64) -> Result<Vec<RecordRow>, JournalError> {
    let mut statement = db.prepare_cached(
        "SELECT seq, at_ms, body FROM records WHERE execution = ?1 AND seq > ?2 ORDER BY seq",
    )?;
    let rows = statement.query_map([signed(id), signed(after)], |row| {
        Ok(RecordRow { seq: unsigned(row.get(0)?)?, at_ms: row.get(1)?, body: row.get(2)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn checkpoint(db: &Connection, id: u64) -> Result<Option<(u64, Vec<u8>)>, JournalError> {
    let mut statement = db.prepare_cached("SELECT seq, body FROM checkpoints WHERE execution = ?1")?;
    Ok(statement.query_row([signed(id)], |row| Ok((unsigned(row.get(0)?)?, row.get(1)?))).optional()?)
}

/// In one transaction: separate reads would each lock the log.
pub(super) fn open_arns(db: &Connection, ids: &[u64]) -> Result<Vec<(u64, ExecutionArn)>, JournalError> {
    let transaction = db.unchecked_transaction()?;
    let mut statement =
        db.prepare_cached("SELECT arn FROM executions WHERE id = ?1 AND status = 'RUNNING'")?;
    let mut arns = Vec::with_capacity(ids.len());
    for &id in ids {
        let arn: Option<String> = statement.query_row([signed(id)], |row| row.get(0)).optional()?;
        arns.extend(arn.map(|arn| (id, ExecutionArn::from_trusted(arn))));
    }
    transaction.finish()?;
    Ok(arns)
}

/// In one transaction, like [`open_arns`].
pub(super) fn open_with_records(db: &Connection, ids: &[u64]) -> Result<Vec<StoredExecution>, JournalError> {
    let transaction = db.unchecked_transaction()?;
    let mut executions = Vec::with_capacity(ids.len());
    for &id in ids {
        let Some(row) = execution(db, id)?.filter(ExecutionRow::is_open) else { continue };
        let checkpoint = checkpoint(db, id)?;
        let records = records(db, id, checkpoint.as_ref().map_or(0, |(seq, _)| *seq))?;
        executions.push(StoredExecution { row, checkpoint, records });
    }
    transaction.finish()?;
    Ok(executions)
}

pub(super) fn ended_before(db: &Connection, stop_ms: i64, limit: usize) -> Result<Vec<u64>, JournalError> {
    let mut statement = db.prepare_cached(
        "SELECT id FROM executions e WHERE stop_ms < ?1 AND status <> 'RUNNING' AND NOT EXISTS (SELECT 1 FROM \
         map_runs r JOIN executions p ON p.id = r.execution WHERE r.arn = e.map_run_arn AND p.status = 'RUNNING') \
         ORDER BY stop_ms LIMIT ?2",
    )?;
    let rows = statement.query_map([stop_ms, signed(limit as u64)], |row| unsigned(row.get(0)?))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn part(db: &Connection, digest: &Digest) -> Result<Option<String>, JournalError> {
    let mut statement = db.prepare_cached("SELECT body FROM parts WHERE digest = ?1")?;
    Ok(statement.query_row([&digest.as_bytes()[..]], |row| row.get(0)).optional()?)
}

pub(super) fn machine(db: &Connection, digest: &Digest) -> Result<Option<Vec<u8>>, JournalError> {
    let mut statement = db.prepare_cached("SELECT body FROM machines WHERE digest = ?1")?;
    Ok(statement.query_row([&digest.as_bytes()[..]], |row| row.get(0)).optional()?)
}

pub(super) fn list(db: &Connection, query: &ListRows) -> Result<Vec<ExecutionRow>, JournalError> {
    let mut sql = format!("SELECT {COLUMNS} FROM executions WHERE ");
    let mut values: Vec<Sql> = Vec::new();
    let (condition, arn) = match &query.owner {
        ExecutionOwner::Everyone => ("map_run_arn IS NULL", None),
        ExecutionOwner::StateMachine(arn) => ("machine_arn = ? AND map_run_arn IS NULL", Some(arn.as_str())),
        ExecutionOwner::Version(arn) => ("version_arn = ?", Some(arn.as_str())),
        ExecutionOwner::Alias(arn) => ("alias_arn = ?", Some(arn.as_str())),
        ExecutionOwner::MapRun(arn) => ("map_run_arn = ?", Some(arn.as_str())),
    };
    sql.push_str(condition);
    values.extend(arn.map(|arn| arn.to_owned().into()));
    // A literal, not a parameter: otherwise SQLite cannot use the partial index of open executions.
    if query.status == Some(RunStatus::Running) {
        sql.push_str(" AND status = 'RUNNING'");
    } else if let Some(status) = query.status {
        sql.push_str(" AND status = ?");
        values.push(status.as_str().to_owned().into());
    }
    match query.redriven {
        Some(true) => sql.push_str(" AND redrive_count > 0"),
        Some(false) => sql.push_str(" AND redrive_count = 0"),
        None => {}
    }
    if let Some(before) = query.before {
        sql.push_str(" AND id < ?");
        values.push(signed(before).into());
    }
    sql.push_str(" ORDER BY id DESC LIMIT ?");
    values.push(signed(query.limit as u64).into());
    let mut statement = db.prepare_cached(&sql)?;
    let rows = statement.query_map(params_from_iter(values), execution_row)?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn open_executions(db: &Connection) -> Result<Vec<u64>, JournalError> {
    let mut statement =
        db.prepare_cached("SELECT id FROM executions WHERE status = 'RUNNING' ORDER BY id")?;
    let rows = statement.query_map([], |row| unsigned(row.get(0)?))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn map_run(db: &Connection, arn: &MapRunArn) -> Result<Option<u64>, JournalError> {
    let mut statement = db.prepare_cached("SELECT execution FROM map_runs WHERE arn = ?1")?;
    Ok(statement.query_row([arn.as_str()], |row| unsigned(row.get(0)?)).optional()?)
}
