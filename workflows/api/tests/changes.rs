//! The engine's changes of executions, the list of all executions, and the catalog's change notifications.

mod stand_ins;

use std::sync::Arc;

use mayfly_workflows_engine::engine::{ExecutionChange, ExecutionOwner, ListQuery, RunStatus};
use mayfly_workflows_engine::service::CredentialScope;
use mayfly_workflows_engine::timers::SystemClock;
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_and_ends_are_told() {
    let (engine, catalog, api) = stand_ins::engine(None, Arc::new(SystemClock)).await;
    let mut catalog_changes = catalog.changes();
    let mut changes = engine.changes();
    for (name, kind, definition) in [
        ("good", "STANDARD", json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}})),
        ("bad", "STANDARD", json!({"StartAt": "A", "States": {"A": {"Type": "Fail", "Error": "Oops"}}})),
        ("express", "EXPRESS", json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}})),
    ] {
        let role = "arn:aws:iam::000000000000:role/any";
        let create =
            json!({"name": name, "type": kind, "definition": definition.to_string(), "roleArn": role});
        let made =
            api.call("CreateStateMachine", &create, &CredentialScope::default()).await.expect("created");
        assert!(catalog_changes.has_changed().expect("the catalog is there"), "{name}");
        catalog_changes.mark_unchanged();
        let start = json!({"stateMachineArn": made["stateMachineArn"], "input": "{\"large\":1}"});
        api.call("StartExecution", &start, &CredentialScope::default()).await.expect("started");
    }
    for status in [RunStatus::Succeeded, RunStatus::Failed] {
        let started = changes.recv().await.expect("a start");
        assert_eq!(
            (started.change, started.execution.status),
            (ExecutionChange::Started, RunStatus::Running)
        );
        let ended = changes.recv().await.expect("an end");
        assert_eq!((ended.change, ended.execution.status), (ExecutionChange::Moved, status));
        assert_eq!(ended.execution.execution_arn, started.execution.execution_arn);
        assert_eq!(
            (&*ended.execution.input, &ended.execution.output),
            ("", &None),
            "payloads are not kept waiting"
        );
    }
    let query =
        |status, from| ListQuery { owner: ExecutionOwner::Everyone, status, redriven: None, limit: 1, from };
    let first = engine.list(query(None, None)).await.expect("a list");
    assert!(first.items[0].state_machine_arn.as_str().ends_with(":bad"), "newest first");
    let second = engine.list(query(None, first.next)).await.expect("a list");
    assert!(
        second.items[0].state_machine_arn.as_str().ends_with(":good") && second.next.is_none(),
        "express ones are not kept"
    );
    let failed = engine.list(query(Some(RunStatus::Failed), None)).await.expect("a list");
    assert_eq!((failed.items.len(), failed.next), (1, None));
    engine.shutdown().await;
}
