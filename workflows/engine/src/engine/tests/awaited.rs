//! Executions that a task started and waits for: stopped when the task is given up, whenever the process ends.

use std::sync::atomic::{AtomicBool, Ordering};

use super::watched::Watched;
use super::*;
use crate::service::{CreateStateMachine, CredentialScope, ResourceName, WorkflowService};
use mayfly_workflows_journal::JournalChange;

const CHILD: &str = "arn:aws:states:us-east-1:000000000000:stateMachine:child";

/// Puts the state machine `CHILD`, whose executions never end by themselves, into the engine's catalog.
async fn add_child_machine(world: &TestEngine) {
    let definition = json!({"StartAt": "N", "States": {"N": with(task("never"), json!({"End": true}))}});
    let request = CreateStateMachine::new(
        CredentialScope::default(),
        ResourceName::parse("child").expect("a name"),
        StateMachineType::Standard,
        definition.to_string(),
        "arn:aws:iam::000000000000:role/r".to_owned(),
    );
    let created = WorkflowService::new(world.engine.clone()).create_state_machine(request).await;
    assert_eq!(created.expect("created").machine.arn, CHILD);
}

fn waits() -> serde_json::Value {
    json!({"Type": "Task", "Resource": "arn:aws:states:::states:startExecution.sync:2",
        "Parameters": {"StateMachineArn": CHILD}})
}

/// The children, as soon as each of them is waited for.
async fn children(world: &TestEngine, parent: &ExecutionArn, count: usize) -> Vec<ExecutionArn> {
    let looked = async {
        loop {
            let submitted = world.lines(parent).await;
            if submitted.iter().filter(|line| line.ends_with("TaskSubmitted")).count() == count {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LONG, looked).await.expect("all are waited for");
    let of = ExecutionOwner::StateMachine(StateMachineArn::from_trusted(CHILD));
    let query = ListQuery { owner: of, status: None, redriven: None, limit: 10, from: None };
    let mut page = world.engine.list(query).await.expect("read").items;
    // Listed newest first.
    page.reverse();
    page.into_iter().map(|child| child.execution_arn).collect()
}

async fn ends_as(world: &TestEngine, arn: &ExecutionArn, status: RunStatus) {
    let ended = tokio::time::timeout(LONG, world.engine.wait(arn)).await.expect("it ends");
    assert_eq!(ended.expect("read").expect("there").status, status, "{arn}");
}

#[tokio::test]
async fn what_was_waited_for_is_stopped_with_who_waited() {
    let world = TestEngine::new().await;
    add_child_machine(&world).await;
    let alone = json!({"StartAt": "W", "States": {"W": with(waits(), json!({"End": true}))}});
    let parent = world.start(&machine(alone, StateMachineType::Standard), "{}").await;
    let children = children(&world, &parent, 1).await;
    world.engine.stop(&parent, None, None).await.expect("stops");
    ends_as(&world, &children[0], RunStatus::Aborted).await;
}

#[tokio::test]
async fn what_was_waited_for_too_long_is_stopped() {
    let world = TestEngine::new().await;
    add_child_machine(&world).await;
    let short = with(waits(), json!({"TimeoutSeconds": 5, "End": true}));
    let definition = json!({"StartAt": "W", "States": {"W": short}});
    let parent = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    let children = children(&world, &parent, 1).await;
    // The child's function is under way for ever: the clock does not jump by itself.
    let now_ms = world.engine.inner.now_ms();
    world.engine.inner.deps.clock.sleep_until(now_ms + 6_000).await;
    ends_as(&world, &parent, RunStatus::Failed).await;
    ends_as(&world, &children[0], RunStatus::Aborted).await;
}

#[tokio::test]
async fn what_was_waited_for_beside_a_failure_is_stopped() {
    let token = "arn:aws:states:::lambda:invoke.waitForTaskToken";
    let fails = with(
        json!({"Type": "Task", "Resource": token,
            "Parameters": {"FunctionName": "echo", "Payload.$": "$$.Task.Token"}}),
        json!({"End": true}),
    );
    let flow = |name: &str, state: serde_json::Value| json!({"StartAt": name, "States": {name: state}});
    let branches = [flow("F", fails.clone()), flow("W", with(waits(), json!({"End": true})))];
    let chosen = json!({"StartAt": "C", "States": {
        "C": {"Type": "Choice", "Default": "W",
            "Choices": [{"Variable": "$", "NumericEquals": 0, "Next": "F"}]},
        "F": fails, "W": with(waits(), json!({"End": true}))}});
    let catches = json!({"Catch": [{"ErrorEquals": ["States.ALL"], "Next": "Rest"}], "Next": "Rest"});
    for (state, input) in [
        (json!({"Type": "Parallel", "Branches": branches}), "{}"),
        (json!({"Type": "Map", "ItemProcessor": chosen}), "[0, 1]"),
    ] {
        let world = TestEngine::new().await;
        add_child_machine(&world).await;
        let definition = json!({"StartAt": "P", "States": {"P": with(state, catches.clone()),
            "Rest": {"Type": "Pass", "End": true}}});
        let parent = world.start(&machine(definition, StateMachineType::Standard), input).await;
        let children = children(&world, &parent, 2).await;
        let token = world.functions.calls.lock().iter().find(|(name, _)| name == "echo").cloned();
        let token = token.expect("was called").1.trim_matches('"').to_owned();
        world.engine.send_task_failure(&token, Some("E".to_owned()), None).await.expect("fails");
        ends_as(&world, &parent, RunStatus::Succeeded).await;
        ends_as(&world, &children[0], RunStatus::Aborted).await;
    }
}

/// A world that stops writing after the end of its first execution is durable, if it is `dying`; `dead` is notified
/// then.
async fn dying_world(
    journal: &Arc<dyn Journal>,
    dying: &Arc<AtomicBool>,
    dead: &Arc<tokio::sync::Notify>,
) -> TestEngine {
    let (is_dying, killed, ended) = (dying.clone(), dead.clone(), AtomicBool::new(false));
    let watched = Watched::new(journal.clone(), move |batch| {
        if ended.load(Ordering::Acquire) {
            killed.notify_one();
            std::mem::forget(batch.done);
            return None;
        }
        let ends = batch.changes.iter().any(|change| matches!(change, JournalChange::Outcome { .. }));
        ended.store(ends && is_dying.load(Ordering::Acquire), Ordering::Release);
        Some(batch)
    });
    TestEngine::on(Arc::new(watched), Arc::default()).await
}

#[tokio::test]
async fn what_was_waited_for_is_stopped_after_a_crash_between() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let (dying, dead) = (Arc::new(AtomicBool::new(false)), Arc::new(tokio::sync::Notify::new()));
    let first = dying_world(&journal, &dying, &dead).await;
    add_child_machine(&first).await;
    let alone = json!({"StartAt": "W", "States": {"W": with(waits(), json!({"End": true}))}});
    let parent = first.start(&machine(alone, StateMachineType::Standard), "{}").await;
    let children = children(&first, &parent, 1).await;
    dying.store(true, Ordering::Release);
    first.engine.stop(&parent, None, None).await.expect("stops");
    tokio::time::timeout(LONG, dead.notified()).await.expect("the child's end is on its way");
    drop(first);

    let second = TestEngine::on(journal, Arc::default()).await;
    assert_eq!(second.engine.resume().await.expect("resumes"), 1, "the child was still running");
    ends_as(&second, &children[0], RunStatus::Aborted).await;
    ends_as(&second, &parent, RunStatus::Aborted).await;
}

#[tokio::test]
async fn a_map_runs_children_are_stopped_after_a_crash_between() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let (dying, dead) = (Arc::new(AtomicBool::new(false)), Arc::new(tokio::sync::Notify::new()));
    let first = dying_world(&journal, &dying, &dead).await;
    let map = json!({"StartAt": "M", "States": {"M": {"Type": "Map", "End": true,
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "N", "States": {"N": with(task("never"), json!({"End": true}))}}}}});
    let parent = first.start(&machine(map, StateMachineType::Standard), "[1, 2]").await;
    let mut children: Vec<ExecutionArn> = Vec::new();
    until("both children have begun", || {
        let found = journal.open_executions().expect("read");
        let rows = found.into_iter().filter_map(|id| journal.execution(id).expect("read"));
        children = rows.map(|row| row.arn).filter(|arn| *arn != parent).collect();
        children.len() == 2
    })
    .await;
    dying.store(true, Ordering::Release);
    first.engine.stop(&parent, None, None).await.expect("stops");
    tokio::time::timeout(LONG, dead.notified()).await.expect("a child's end is on its way");
    drop(first);

    let second = TestEngine::on(journal, Arc::default()).await;
    assert_eq!(second.engine.resume().await.expect("resumes"), 2, "both children were still running");
    for child in children {
        ends_as(&second, &child, RunStatus::Aborted).await;
    }
}
