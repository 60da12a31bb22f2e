//! The state machines of executions: compiled once and cached by content, and written to the journal once.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use mayfly_workflows_language::arn::StateMachineArn;
use mayfly_workflows_language::definition::{FlowId, StateMachineType};
use mayfly_workflows_language::execution::Digest;
use mayfly_workflows_language::parse;
use parking_lot::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use serde::{Deserialize, Serialize};

use super::types::{RevisionDetails, StartedMachine};
use mayfly_workflows_journal::{Journal, JournalChange, JournalError};

/// State machines by their content.
pub(super) struct Definitions {
    journal: Arc<dyn Journal>,
    /// The maximum number of compiled state machines in memory.
    cached_max: usize,
    compiled: Mutex<HashMap<Digest, Arc<StartedMachine>>>,
    /// Digests of state machines in memory, by the address of the shared value.
    digests: Mutex<HashMap<usize, (Weak<StartedMachine>, Digest)>>,
    /// State machines that are in the journal.
    written: Mutex<HashSet<Digest>>,
    /// Read-held from checking that a definition is stored until the start that refers to it is enqueued; write-held
    /// while unreferenced definitions are deleted.
    deletion: RwLock<()>,
}

/// A state machine as the journal keeps it.
#[derive(Serialize, Deserialize)]
struct StoredDefinition {
    arn: StateMachineArn,
    name: String,
    role_arn: String,
    kind: StateMachineType,
    definition: String,
    /// A [`RevisionDetails`]; `null` or `{}` for a state machine that is not one of the catalog.
    details: serde_json::Value,
    /// The flow that a map run's children run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flow: Option<u32>,
}

impl Definitions {
    /// `cached_max` bounds the compiled state machines in memory.
    pub(super) fn new(journal: Arc<dyn Journal>, cached_max: usize) -> Self {
        Self {
            journal,
            cached_max,
            compiled: Mutex::default(),
            digests: Mutex::default(),
            written: Mutex::default(),
            deletion: RwLock::default(),
        }
    }

    /// The state machine with this digest, read and compiled again if it is not in memory. May block.
    pub(super) fn get(&self, digest: Digest) -> Result<Arc<StartedMachine>, JournalError> {
        if let Some(machine) = self.compiled.lock().get(&digest) {
            return Ok(machine.clone());
        }
        let body = self.journal.machine(&digest)?.ok_or_else(|| damaged("a row is missing"))?;
        let stored: StoredDefinition = serde_json::from_slice(&body).map_err(damaged)?;
        let definition = parse::compile_accepted(&stored.definition, stored.kind)
            .map_err(|rejection| damaged(rejection.message()))?;
        let machine = Arc::new(StartedMachine {
            arn: stored.arn,
            name: stored.name,
            role_arn: stored.role_arn,
            kind: stored.kind,
            definition_text: stored.definition.into(),
            definition: Arc::new(definition),
            details: details_of(stored.details)?,
            flow: stored.flow.map(FlowId),
        });
        self.cache(digest, machine.clone());
        Ok(machine)
    }

    /// The digest of a state machine, computed once for each shared value.
    pub(super) fn digest_of(&self, machine: &Arc<StartedMachine>) -> Digest {
        let address = Arc::as_ptr(machine) as usize;
        if let Some((there, digest)) = self.digests.lock().get(&address)
            && there.upgrade().is_some_and(|there| Arc::ptr_eq(&there, machine))
        {
            return *digest;
        }
        let (digest, _) = stored(machine);
        let mut digests = self.digests.lock();
        if digests.len() >= self.cached_max {
            digests.retain(|_, (machine, _)| machine.strong_count() > 0);
        }
        digests.insert(address, (Arc::downgrade(machine), digest));
        drop(digests);
        self.cache(digest, machine.clone());
        digest
    }

    fn cache(&self, digest: Digest, machine: Arc<StartedMachine>) {
        let mut compiled = self.compiled.lock();
        if compiled.len() >= self.cached_max {
            compiled.clear();
        }
        compiled.insert(digest, machine);
    }

    /// Keeps definitions in the journal as long as the guard is held: from [`Definitions::unwritten`] until the start
    /// that refers to the definition is in the journal's queue.
    pub(super) fn keep(&self) -> RwLockReadGuard<'_, ()> {
        self.deletion.read()
    }

    /// The change that writes a state machine to the journal, unless it is there.
    pub(super) fn unwritten(&self, digest: Digest, machine: &StartedMachine) -> Option<JournalChange> {
        if self.written.lock().contains(&digest) {
            return None;
        }
        let (_, body) = stored(machine);
        Some(JournalChange::Machine { digest, body })
    }

    /// Notes that a state machine is durable.
    pub(super) fn note_written(&self, digest: Digest) {
        self.written.lock().insert(digest);
    }

    /// Lets a deletion of executions delete definitions, too: as long as the guard is held no start refers to one, and a
    /// start after it writes the definition again.
    pub(super) fn begin_deletion(&self) -> RwLockWriteGuard<'_, ()> {
        let guard = self.deletion.write();
        self.written.lock().clear();
        guard
    }
}

/// A state machine's content and its digest, for the journal.
fn stored(machine: &StartedMachine) -> (Digest, Arc<[u8]>) {
    let stored = StoredDefinition {
        arn: machine.arn.clone(),
        name: machine.name.clone(),
        role_arn: machine.role_arn.clone(),
        kind: machine.kind,
        definition: machine.definition_text.to_string(),
        details: serde_json::to_value(&machine.details).unwrap_or_default(),
        flow: machine.flow.map(|flow| flow.0),
    };
    let body = serde_json::to_vec(&stored).unwrap_or_default();
    (Digest::of(&body), body.into())
}

fn details_of(stored: serde_json::Value) -> Result<Option<RevisionDetails>, JournalError> {
    match stored {
        serde_json::Value::Null => Ok(None),
        serde_json::Value::Object(members) if members.is_empty() => Ok(None),
        stored => serde_json::from_value(stored).map(Some).map_err(damaged),
    }
}

fn damaged(reason: impl ToString) -> JournalError {
    JournalError::RowDamaged { table: "machines", reason: reason.to_string() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::machine;
    use super::*;
    use mayfly_workflows_journal::{Batch, MemoryJournal};
    use serde_json::json;

    fn pass(name: &str) -> Arc<StartedMachine> {
        let definition = json!({"StartAt": name, "States": {name: {"Type": "Pass", "End": true}}});
        machine(definition, StateMachineType::Standard)
    }

    #[test]
    fn a_definition_is_written_once_until_definitions_are_deleted() {
        let definitions = Definitions::new(Arc::new(MemoryJournal::default()), 2);
        let machine = pass("A");
        let digest = definitions.digest_of(&machine);
        assert!(definitions.unwritten(digest, &machine).is_some(), "nothing is durable yet");
        definitions.note_written(digest);
        assert!(definitions.unwritten(digest, &machine).is_none());
        drop(definitions.begin_deletion());
        assert!(definitions.unwritten(digest, &machine).is_some(), "it may be deleted");
    }

    #[test]
    fn a_definition_that_is_not_cached_is_read_from_the_journal() {
        let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
        let machine = pass("A");
        let digest = {
            let definitions = Definitions::new(journal.clone(), 2);
            let digest = definitions.digest_of(&machine);
            assert!(Arc::ptr_eq(&definitions.get(digest).expect("cached"), &machine));
            let changes = definitions.unwritten(digest, &machine).into_iter().collect();
            journal
                .write(Batch { changes, done: Box::new(|written| written.expect("written")) })
                .expect("queued");
            digest
        };
        let definitions = Definitions::new(journal, 2);
        let read = definitions.get(digest).expect("read");
        assert_eq!((&read.arn, &read.definition_text), (&machine.arn, &machine.definition_text));
        assert_eq!(definitions.digest_of(&read), digest, "the content is the same");
        let missing = definitions.get(Digest::of(b"another")).expect_err("not there");
        assert!(missing.to_string().contains("a row is missing"), "{missing}");
    }

    #[test]
    fn the_details_of_a_revision_keep_their_form_in_the_journal() {
        let stored = json!({
            "encryptionConfiguration": {"type": "AWS_OWNED_KEY"},
            "loggingConfiguration": {"includeExecutionData": false, "level": "OFF"},
            "revisionId": null,
            "tracingConfiguration": {"enabled": true},
            "updateDate": 7,
        });
        let details = details_of(stored.clone()).expect("read").expect("there");
        assert_eq!(serde_json::to_value(&details).expect("JSON"), stored);
        for none in [json!(null), json!({})] {
            assert_eq!(details_of(none).expect("read"), None);
        }
        assert!(details_of(json!({"updateDate": "x"})).is_err());
    }

    #[test]
    fn no_more_definitions_are_cached_than_allowed() {
        let definitions = Definitions::new(Arc::new(MemoryJournal::default()), 2);
        for name in ["A", "B", "C", "D", "E"] {
            definitions.digest_of(&pass(name));
            assert!(definitions.compiled.lock().len() <= 2);
        }
    }
}
