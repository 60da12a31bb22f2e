//! The artifacts that executions reference, recorded in the same write as the reference.
//!
//! An execution's state is derived from its definition, its input and its records. It cannot use an artifact that none
//! of them references; a referenced one must be kept, however long the execution sleeps. Finding the references reads
//! only a few rows.

use mayfly_workflows_language::arn::ExecutionArn;
use mayfly_workflows_language::execution::{Digest, Payload};
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::read::signed;
use super::{ExecutionRow, JournalError};

/// The prefix of an artifact's digest, up to the colon.
const ALGORITHM: &[u8] = b"sha256";
const HEX_BYTES: usize = 64;

/// The artifacts that a text references, with duplicates.
pub(super) fn artifacts_in(text: &[u8]) -> impl Iterator<Item = Digest> + '_ {
    let colons = text.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at);
    colons.filter_map(|at| {
        let hex = text.get(at + 1..at + 1 + HEX_BYTES).filter(|_| text[..at].ends_with(ALGORITHM))?;
        let mut digest = [0; 32];
        hex::decode_to_slice(hex, &mut digest).ok()?;
        Some(Digest::from_bytes(digest))
    })
}

pub(super) fn note(db: &Connection, execution: u64, text: &[u8]) -> rusqlite::Result<()> {
    for artifact in artifacts_in(text) {
        db.prepare_cached("INSERT OR IGNORE INTO artifacts_of_executions VALUES (?1, ?2)")?
            .execute(params![&artifact.as_bytes()[..], signed(execution)])?;
    }
    Ok(())
}

pub(super) fn note_start(db: &Connection, row: &ExecutionRow) -> rusqlite::Result<()> {
    match &row.input {
        Payload::Inline(json) => note(db, row.id, json.text().as_bytes()),
        // Recorded with the part, which is in the same batch.
        Payload::Part { .. } => Ok(()),
    }
}

pub(super) fn note_machine(db: &Connection, machine: &Digest, body: &[u8]) -> rusqlite::Result<()> {
    for artifact in artifacts_in(body) {
        db.prepare_cached("INSERT OR IGNORE INTO artifacts_of_machines VALUES (?1, ?2)")?
            .execute(params![&artifact.as_bytes()[..], &machine.as_bytes()[..]])?;
    }
    Ok(())
}

/// The ARN of an open execution that references the artifact in its data or its definition.
pub(super) fn user_of(db: &Connection, artifact: &Digest) -> Result<Option<ExecutionArn>, JournalError> {
    let artifact = &artifact.as_bytes()[..];
    let arn = |row: &Row<'_>| Ok(ExecutionArn::from_trusted(row.get::<_, String>(0)?));
    let mut itself = db.prepare_cached(
        "SELECT e.arn FROM artifacts_of_executions a JOIN executions e ON e.id = a.execution \
         WHERE a.artifact = ?1 AND e.status = 'RUNNING' LIMIT 1",
    )?;
    if let Some(user) = itself.query_row([artifact], arn).optional()? {
        return Ok(Some(user));
    }
    // Few definitions reference artifacts; the check avoids a scan of all open executions.
    let mut machines = db.prepare_cached("SELECT 1 FROM artifacts_of_machines WHERE artifact = ?1")?;
    if !machines.exists([artifact])? {
        return Ok(None);
    }
    let mut by_definition = db.prepare_cached(
        "SELECT arn FROM executions WHERE status = 'RUNNING' AND machine IN \
         (SELECT machine FROM artifacts_of_machines WHERE artifact = ?1) LIMIT 1",
    )?;
    Ok(by_definition.query_row([artifact], arn).optional()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_text_names() {
        let (a, b) = ("a".repeat(64), "0123456789abcdef".repeat(4));
        let text = format!(
            r#"{{"files":{{"x":"sha256:{a}"}},"text":"see \\"sha256:{b}\\" and sha256:{a}","no":["sha256:beef","md5:{a}","sha256:{}"]}}"#,
            "g".repeat(64)
        );
        let found: Vec<String> = artifacts_in(text.as_bytes()).map(|digest| digest.hex()).collect();
        assert_eq!(found, [&*a, &*b, &*a]);
        for text in ["", "sha256:", ":", &format!("256:{a}"), &format!("sha256:{}", &a[1..])] {
            assert_eq!(artifacts_in(text.as_bytes()).count(), 0, "{text}");
        }
    }
}
