//! Payloads: small ones are stored in their row, large ones once by their digest.

use mayfly_workflows_language::execution::{Digest, Payload};

use super::{Journal, JournalChange, JournalError};

/// Texts of at least this many bytes are stored by their digest: below it, the digest and its row would take more space
/// than they save.
pub const PART_BYTES_MIN: usize = 1024;

/// Prepares a payload for writing: a large text is moved into `changes` as a part.
pub fn stored(payload: &Payload, changes: &mut Vec<JournalChange>) -> Payload {
    match payload {
        Payload::Inline(json) if json.text().len() >= PART_BYTES_MIN => {
            let text = json.text();
            let digest = Digest::of(text.as_bytes());
            changes.push(JournalChange::Part { digest, text: text.clone() });
            Payload::Part { part: digest }
        }
        other => other.clone(),
    }
}

/// Loads a payload: a part is replaced by its text.
///
/// # Errors
/// The journal cannot be read, or it lacks the part.
pub fn loaded(payload: Payload, journal: &dyn Journal) -> Result<Payload, JournalError> {
    match payload {
        Payload::Inline(_) => Ok(payload),
        Payload::Part { part } => match journal.part(&part)? {
            Some(text) => Ok(Payload::Inline(text.into())),
            None => {
                Err(JournalError::RowDamaged { table: "parts", reason: format!("{} is missing", part.hex()) })
            }
        },
    }
}
