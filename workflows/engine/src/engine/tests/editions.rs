//! The edition of the rules that a stored execution follows.

use super::*;
use mayfly_workflows_journal::{Birth, ExecutionRow, JournalError, RecordRow, StoredExecution};
use mayfly_workflows_machine::Machine;

/// A waiting state, a task, and a task that never ends.
fn stored_machine() -> Arc<StartedMachine> {
    let states = json!({"StartAt": "Wait", "States": {
        "Wait": {"Type": "Wait", "Seconds": 1, "Next": "Call"},
        "Call": with(task("double"), json!({"Next": "Stop"})),
        "Stop": with(task("never"), json!({"TimeoutSeconds": 60, "End": true}))}});
    machine(states, StateMachineType::Standard)
}

/// The constant data of an execution, as a journal of edition 4 has it.
const BIRTH: &str = r#"{"seed":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16],"edition":4}"#;
/// Its records: the end of the wait, and the result of the first task.
const RECORDS: [&str; 2] = [r#"{"t":"timer","n":1}"#, r#"{"t":"ok","n":2,"output":"42"}"#];

/// An engine with an execution of [`stored_machine`] that calls its last function, and the execution's row.
async fn started() -> (TestEngine, ExecutionRow) {
    let journal = Arc::new(MemoryJournal::default());
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let arn = world.start(&stored_machine(), "21").await;
    let stops = || world.functions.calls.lock().last().is_some_and(|(name, _)| name == "never");
    until("the last function is called", stops).await;
    let row = journal.execution_by_arn(&arn).expect("read").expect("there");
    (world, row)
}

#[tokio::test]
async fn a_stored_execution_of_the_present_edition_loads() {
    let (world, row) = started().await;
    let row = ExecutionRow { birth: serde_json::from_str(BIRTH).expect("decodes"), ..row };
    let records = RECORDS.iter().zip(1..).map(|(body, seq)| RecordRow {
        seq,
        at_ms: row.start_ms + 1_000,
        body: body.as_bytes().to_vec(),
    });
    let records: Vec<RecordRow> = records.collect();
    let inner = &world.engine.inner;
    let replayed =
        inner.recomputed_from(StoredExecution { row, checkpoint: None, records }).expect("replays");
    let replayed = replayed.lock();
    assert_eq!(replayed.seq, 2);
    let machine = replayed.machine.as_ref().expect("no event is being applied");
    let checkpoint = machine.checkpoint().expect("written");
    let text = String::from_utf8_lossy(&checkpoint);
    assert!(text.contains("function:never"), "the last task is called: {text}");
    let state_machine = inner.definitions.get(replayed.row.machine).expect("there");
    let facts = machine.facts().clone();
    let restored = Machine::from_checkpoint(facts, state_machine.definition.clone(), &checkpoint);
    let restored = restored.expect("decodes");
    assert_eq!(format!("{restored:?}"), format!("{machine:?}"));
}

#[tokio::test]
async fn an_unknown_edition_is_refused() {
    let (world, row) = started().await;
    for edition in [0, 3, 5] {
        let row = ExecutionRow { birth: Birth { edition, ..row.birth.clone() }, ..row.clone() };
        let stored = StoredExecution { row: row.clone(), checkpoint: None, records: Vec::new() };
        let Err(error) = world.engine.inner.recomputed_from(stored) else {
            panic!("edition {edition} is replayed");
        };
        let expected = format!(
            "execution {} follows edition {edition} of the workflow rules, and this version of Mayfly has edition 4 \
             only: let the version of Mayfly that started the execution finish it",
            row.id
        );
        assert_eq!(error.to_string(), expected);
        assert!(matches!(error, JournalError::UnknownEdition { .. }), "{error:?}");
    }
    // An execution without an edition has edition 0.
    let without: Birth = serde_json::from_str(&BIRTH.replace(",\"edition\":4", "")).expect("decodes");
    assert_eq!(without.edition, 0);
}
