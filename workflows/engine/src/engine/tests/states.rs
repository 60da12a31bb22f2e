//! Every kind of state, with the events AWS would tell.

use mayfly_workflows_language::execution::JsonText;
use mayfly_workflows_language::value::Value;

use super::*;

#[tokio::test]
async fn a_function_is_called() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {"A": with(task("double"), json!({"End": true}))}});
    let (ended, lines) = world.run(definition, "21").await;
    assert_eq!(ended.status, RunStatus::Succeeded);
    assert_eq!(ended.output.as_deref(), Some("42"));
    assert_eq!(
        lines,
        [
            "1 0 ExecutionStarted",
            "2 0 TaskStateEntered",
            "3 2 LambdaFunctionScheduled",
            "4 3 LambdaFunctionStarted",
            "5 4 LambdaFunctionSucceeded",
            "6 5 TaskStateExited",
            "7 6 ExecutionSucceeded",
        ]
    );
}

#[tokio::test]
async fn an_answer_is_told_alike_whenever_it_is_told() {
    let journal: Arc<dyn Journal> = Arc::new(MemoryJournal::default());
    let world = TestEngine::on(journal.clone(), Arc::default()).await;
    let invoke = json!({"Type": "Task", "Resource": "arn:aws:states:::lambda:invoke", "End": true,
        "Parameters": {"FunctionName": "echo", "Payload.$": "$"}});
    let definition = json!({"StartAt": "A", "States": {"A": invoke}});
    let arn = world.start(&machine(definition, StateMachineType::Standard), r#"{"b":1,"a":"ä"}"#).await;
    let output = world.engine.wait(&arn).await.expect("read").expect("there").output.expect("succeeded");
    let told: serde_json::Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(told["Payload"], json!({"b": 1, "a": "ä"}));
    assert_eq!((&told["StatusCode"], &told["ExecutedVersion"]), (&json!(200), &json!("$LATEST")));
    let headers = &told["SdkHttpMetadata"]["HttpHeaders"];
    assert_eq!(headers["x-amzn-RequestId"], told["SdkResponseMetadata"]["RequestId"]);
    // The envelope of the answer is computed, not stored.
    let id = journal.execution_by_arn(&arn).expect("read").expect("there").id;
    let records = journal.records(id, 0).expect("read");
    let bytes = records.iter().map(|record| record.body.len()).sum::<usize>();
    assert!(records.len() == 1 && bytes < 100, "{bytes} bytes in {records:?}");
    // In the history too, and by a process that has only the journal.
    for world in [world, TestEngine::on(journal, Arc::default()).await] {
        let all = HistoryQuery { reverse: false, include_data: true, limit: 100, from: None };
        let history = world.engine.history(&arn, all).await.expect("read").expect("there");
        assert_eq!(history.items[4]["taskSucceededEventDetails"]["output"], *output);
        assert_eq!(history.items[5]["stateExitedEventDetails"]["output"], *output);
    }
}

#[tokio::test]
async fn waiting_takes_no_time() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": {"Type": "Wait", "Seconds": 86_400, "Next": "B"}, "B": {"Type": "Succeed"}}});
    let (ended, lines) = world.run(definition, "{}").await;
    assert_eq!(ended.status, RunStatus::Succeeded);
    let waited = ended.stop_date.expect("ended").as_second() - ended.start_date.as_second();
    assert_eq!(waited, 86_400);
    assert_eq!(lines[2], "3 2 WaitStateExited");
}

#[tokio::test]
async fn errors_are_retried_and_caught() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": with(task("fail"), json!({
            "Retry": [{"ErrorEquals": ["Broken"], "MaxAttempts": 2, "IntervalSeconds": 3}],
            "Catch": [{"ErrorEquals": ["States.ALL"], "ResultPath": "$.e", "Next": "B"}],
            "Next": "B"})),
        "B": {"Type": "Pass", "End": true}}});
    let (ended, lines) = world.run(definition, "{\"k\":1}").await;
    assert_eq!(
        ended.output.as_deref(),
        Some(r#"{"k":1,"e":{"Error":"Broken","Cause":"{\"errorMessage\":\"no\"}"}}"#)
    );
    assert_eq!(world.functions.calls.lock().len(), 3);
    let waited = ended.stop_date.expect("ended").as_second() - ended.start_date.as_second();
    assert_eq!(waited, 3 + 6);
    assert_eq!(lines.iter().filter(|line| line.ends_with("LambdaFunctionFailed")).count(), 3);
    assert_eq!(lines[5], "6 5 LambdaFunctionScheduled");
}

#[tokio::test]
async fn a_task_runs_out_of_time() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": with(task("never"), json!({"TimeoutSeconds": 5, "End": true,}))}});
    // A function that is being called keeps a virtual clock from jumping: it is moved by hand.
    let arn = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    world.engine.inner.deps.clock.sleep_until(1_700_000_000_000 + 5_000).await;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.error.as_deref()), (RunStatus::Failed, Some("States.Timeout")));
    assert_eq!(world.lines(&arn).await[4], "5 4 LambdaFunctionTimedOut");
}

#[tokio::test]
async fn branches_run_side_by_side() {
    let world = TestEngine::new().await;
    let branch =
        |name: &str| json!({"StartAt": name, "States": {name: with(task("echo"), json!({"End": true}))}});
    let definition = json!({"StartAt": "P", "States": {
        "P": {"Type": "Parallel", "Branches": [branch("A"), branch("B")], "End": true}}});
    let (ended, lines) = world.run(definition, "7").await;
    assert_eq!(ended.output.as_deref(), Some("[7,7]"));
    assert_eq!(lines[3], "4 3 TaskStateEntered");
    assert!(lines.last().is_some_and(|line| line.ends_with("ExecutionSucceeded")));
    assert!(lines.iter().any(|line| line.ends_with("ParallelStateSucceeded")));
}

#[tokio::test]
async fn a_map_keeps_the_order_of_its_items() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "M", "States": {"M": {"Type": "Map", "MaxConcurrency": 2,
        "ItemProcessor": {"StartAt": "A", "States": {"A": with(task("double"), json!({"End": true}))}}, "End": true}}});
    let (ended, _) = world.run(definition, "[1,2,3,4,5]").await;
    assert_eq!(ended.output.as_deref(), Some("[2,4,6,8,10]"));
}

#[tokio::test]
async fn an_empty_map_ends_at_once() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "M", "States": {"M": {"Type": "Map",
        "ItemProcessor": {"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}}, "End": true}}});
    let (ended, lines) = world.run(definition, "[]").await;
    assert_eq!(ended.output.as_deref(), Some("[]"));
    assert_eq!(lines[3..], ["4 3 MapStateSucceeded", "5 3 MapStateExited", "6 5 ExecutionSucceeded"]);
}

fn distributed(more: serde_json::Value) -> serde_json::Value {
    let map = json!({"Type": "Map", "End": true, "ItemProcessor": {
        "ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
        "StartAt": "A", "States": {"A": with(task("echo"), json!({"End": true}))}}});
    json!({"StartAt": "M", "States": {"M": with(map, more)}})
}

#[tokio::test]
async fn a_distributed_map_runs_children() {
    let world = TestEngine::new().await;
    let arn = world
        .start(&machine(distributed(json!({"Label": "L"})), StateMachineType::Standard), "[1,2,3]")
        .await;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.output.as_deref(), Some("[1,2,3]"));
    let lines = world.lines(&arn).await;
    assert_eq!(
        lines[2..6],
        ["3 2 MapStateStarted", "4 3 MapRunStarted", "5 4 MapRunSucceeded", "6 5 MapStateSucceeded",]
    );
    let runs = world.engine.list_map_runs(&arn).await.expect("read").expect("there");
    let [run] = runs.as_slice() else { panic!("one run") };
    assert_eq!(run.execution_counts.succeeded, 3);
    let of = ExecutionOwner::MapRun(run.map_run_arn.clone());
    let query = ListQuery { owner: of, status: None, redriven: None, limit: 2, from: None };
    let page = world.engine.list(query).await.expect("lists");
    assert_eq!(page.items.len(), 2);
    assert!(page.next.is_some());
    assert_eq!(page.items[0].state_machine_arn, "arn:aws:states:us-east-1:000000000000:stateMachine:m/L");
    let run_arn = run.map_run_arn.clone();
    assert!(world.engine.describe_map_run(&run_arn).await.expect("read").is_some());
}

#[tokio::test]
async fn items_come_from_files_in_batches_and_results_go_to_files() {
    let world = TestEngine::new().await;
    world.files.0.lock().insert("b/in.csv".to_owned(), "id,name\n1,x\n2,y\n3,z\n".into());
    let definition = distributed(json!({
        "ItemReader": {"Resource": "arn:aws:states:::s3:getObject",
            "ReaderConfig": {"InputType": "CSV", "CSVHeaderLocation": "FIRST_ROW"},
            "Parameters": {"Bucket": "b", "Key": "in.csv"}},
        "ItemBatcher": {"MaxItemsPerBatch": 2},
        "ResultWriter": {"Resource": "arn:aws:states:::s3:putObject", "Parameters": {"Bucket": "o", "Prefix": "p"}}}));
    let (ended, _) = world.run(definition, "{}").await;
    assert_eq!((ended.status, ended.cause.as_deref()), (RunStatus::Succeeded, None));
    let files = world.files.0.lock();
    let written = files.iter().find(|(name, _)| name.ends_with("SUCCEEDED_0.json")).expect("written").1;
    let written: serde_json::Value = serde_json::from_slice(written).expect("JSON");
    assert_eq!(written.as_array().map(Vec::len), Some(2));
    let inputs: Vec<&str> =
        written.as_array().into_iter().flatten().filter_map(|item| item["Input"].as_str()).collect();
    assert!(inputs.contains(&r#"{"Items":[{"id":"1","name":"x"},{"id":"2","name":"y"}]}"#), "{inputs:?}");
}

#[tokio::test]
async fn a_header_stands_once_in_a_file() {
    let world = TestEngine::new().await;
    world.files.0.lock().insert("b/in.csv".to_owned(), "id,name,id\n1,x,2\n".into());
    let definition = distributed(json!({"ItemReader": {"Resource": "arn:aws:states:::s3:getObject",
        "ReaderConfig": {"InputType": "CSV", "CSVHeaderLocation": "FIRST_ROW"},
        "Parameters": {"Bucket": "b", "Key": "in.csv"}}}));
    let (ended, _) = world.run(definition, "{}").await;
    assert_eq!(ended.error.as_deref(), Some("States.ItemReaderFailed"));
    assert!(ended.cause.is_some_and(|cause| cause.ends_with("CSV headers cannot contain duplicates.")));
}

#[tokio::test]
async fn failures_are_tolerated_up_to_a_number() {
    let world = TestEngine::new().await;
    let definition = |tolerated| {
        json!({"StartAt": "M", "States": {"M": {"Type": "Map", "End": true, "ToleratedFailureCount": tolerated,
            "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
                "StartAt": "C", "States": {
                    "C": {"Type": "Choice", "Choices": [{"Variable": "$", "NumericEquals": 1, "Next": "F"}], "Default": "A"},
                    "A": {"Type": "Pass", "End": true}, "F": {"Type": "Fail", "Error": "E"}}}}}})
    };
    let (ended, _) = world.run(definition(1), "[0,1,2]").await;
    assert_eq!(ended.output.as_deref(), Some("[0,2]"));
    let (ended, lines) = world.run(definition(0), "[0,1,2]").await;
    assert_eq!(ended.error.as_deref(), Some("States.ExceedToleratedFailureThreshold"));
    assert_eq!(lines[4..], ["5 4 MapRunFailed", "6 5 MapStateFailed", "7 6 ExecutionFailed"]);
}

#[tokio::test]
async fn a_bad_number_of_items_to_read_fails_the_map_run() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "M", "States": {"M": {"Type": "Map", "End": true,
        "ItemReader": {"Resource": "arn:aws:states:::s3:getObject", "ReaderConfig": {"InputType": "JSON",
            "MaxItemsPath": "$.most"}, "Parameters": {"Bucket": "b", "Key": "k"}},
        "ItemProcessor": {"ProcessorConfig": {"Mode": "DISTRIBUTED", "ExecutionType": "STANDARD"},
            "StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}}}}});
    let (ended, lines) = world.run(definition, "{\"most\":-1}").await;
    assert_eq!(ended.error.as_deref(), Some("States.ItemReaderFailed"));
    assert_eq!(ended.cause.as_deref(), Some("field MaxItems must be positive"));
    assert_eq!(
        lines[3..],
        ["4 3 MapRunStarted", "5 4 MapRunFailed", "6 5 MapStateFailed", "7 6 ExecutionFailed"]
    );
}

#[tokio::test]
async fn a_worker_takes_an_activity() {
    let world = TestEngine::new().await;
    let arn = "arn:aws:states:us-east-1:000000000000:activity:a";
    let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": arn, "End": true}}});
    let execution = world.start(&machine(definition, StateMachineType::Standard), "{\"k\":1}").await;
    let work = world.engine.get_activity_task(&activity_arn(arn), Some("w".to_owned())).await.expect("work");
    assert_eq!(work.input, "{\"k\":1}");
    assert_eq!(world.engine.send_task_success("Invalid", "1").await, Err(TokenError::Invalid));
    world.engine.send_task_heartbeat(&work.token).await.expect("alive");
    world.engine.send_task_success(&work.token, "{\"done\":true}").await.expect("taken");
    let ended = world.engine.wait(&execution).await.expect("read").expect("there");
    assert_eq!(ended.output.as_deref(), Some("{\"done\":true}"));
    assert_eq!(world.engine.send_task_success(&work.token, "1").await, Err(TokenError::TimedOut));
    let lines = world.lines(&execution).await;
    assert_eq!(lines[2..5], ["3 2 ActivityScheduled", "4 3 ActivityStarted", "5 4 ActivitySucceeded"]);
}

#[tokio::test]
async fn an_activity_that_is_not_there_is_a_runtime_error() {
    let world = TestEngine::new().await;
    let arn = "arn:aws:states:us-east-1:000000000000:activity:missing";
    let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": arn, "End": true}}});
    let (ended, lines) = world.run(definition, "{}").await;
    assert_eq!(ended.error.as_deref(), Some("States.Runtime"));
    assert_eq!(
        ended.cause.as_deref(),
        Some(
            "An error occurred while executing the state 'A' (entered at the event id #2). The activity \
             arn:aws:states:us-east-1:000000000000:activity:missing does not exist."
        )
    );
    assert_eq!(lines[2], "3 2 ExecutionFailed");
}

#[tokio::test]
async fn a_heartbeat_that_stays_away_ends_a_task() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Task", "End": true, "HeartbeatSeconds": 9,
        "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
        "Parameters": {"FunctionName": "echo", "Payload": {"t.$": "$$.Task.Token"}}}}});
    let (ended, lines) = world.run(definition, "{}").await;
    assert_eq!(ended.error.as_deref(), Some("States.Timeout"));
    assert_eq!(
        lines[2..6],
        ["3 2 TaskScheduled", "4 3 TaskStarted", "5 4 TaskSubmitted", "6 5 TaskTimedOut"]
    );
}

/// Heartbeats are due from a worker: before a worker takes the task, only its timeout runs.
#[tokio::test]
async fn an_activity_owes_heartbeats_once_it_is_taken() {
    let world = TestEngine::new().await;
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let definition = json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": activity, "End": true,
        "TimeoutSeconds": 60, "HeartbeatSeconds": 9}}});
    let begun_ms = world.engine.inner.now_ms();
    let (ended, lines) = world.run(definition.clone(), "{}").await;
    assert_eq!(ended.error.as_deref(), Some("States.Timeout"));
    assert_eq!(lines[2..4], ["3 2 ActivityScheduled", "4 3 ActivityTimedOut"]);
    assert!(world.engine.inner.now_ms() >= begun_ms + 60_000);

    let arn = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    world.engine.get_activity_task(&activity_arn(activity), None).await.expect("work");
    let taken_ms = world.engine.inner.now_ms();
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.error.as_deref(), Some("States.Timeout"));
    assert!((9_000..60_000).contains(&(world.engine.inner.now_ms() - taken_ms)));
}

#[tokio::test]
async fn executions_are_counted_by_type_and_end() {
    let world = TestEngine::new().await;
    let ends = json!({"StartAt": "A", "States": {"A": {"Type": "Pass", "End": true}}});
    let fails = json!({"StartAt": "A", "States": {"A": {"Type": "Fail"}}});
    for (definition, kind) in [
        (&ends, StateMachineType::Standard),
        (&fails, StateMachineType::Standard),
        (&fails, StateMachineType::Express),
        (&fails, StateMachineType::Express),
    ] {
        let arn = world.start(&machine(definition.clone(), kind), "{}").await;
        if kind == StateMachineType::Standard {
            world.engine.wait(&arn).await.expect("read").expect("there");
        }
    }
    let told = world.engine.executions_so_far().map(|of| {
        let ended = |wanted| of.ended.iter().find(|(status, _)| *status == wanted).map(|(_, count)| *count);
        (of.kind, of.started, ended(RunStatus::Succeeded), ended(RunStatus::Failed))
    });
    assert_eq!(
        told,
        [(StateMachineType::Standard, 2, Some(1), Some(1)), (StateMachineType::Express, 2, Some(0), Some(2))]
    );
    assert_eq!(world.engine.open_executions(), 0);
}

/// The event has one name and catchers accept both; a task that is late is no missed heartbeat.
#[tokio::test]
async fn a_missed_heartbeat_has_two_names() {
    let world = TestEngine::new().await;
    for (limit, name, caught) in [
        ("HeartbeatSeconds", "States.HeartbeatTimeout", true),
        ("HeartbeatSeconds", "States.Timeout", true),
        ("TimeoutSeconds", "States.HeartbeatTimeout", false),
    ] {
        let definition = json!({"StartAt": "A", "States": {
            "A": {"Type": "Task", "End": true, limit: 9,
                "Resource": "arn:aws:states:::lambda:invoke.waitForTaskToken",
                "Parameters": {"FunctionName": "echo", "Payload": {"t.$": "$$.Task.Token"}},
                "Catch": [{"ErrorEquals": [name], "Next": "B"}]},
            "B": {"Type": "Succeed"}}});
        let (ended, _) = world.run(definition, "{}").await;
        assert_eq!(ended.error.is_none(), caught, "{limit}, {name}");
    }
}

#[tokio::test]
async fn an_execution_is_stopped_and_redriven() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": {"Type": "Pass", "Next": "B"}, "B": with(task("fail"), json!({"End": true}))}});
    let arn = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.redrive_status, RedriveStatus::Redrivable);
    world.engine.redrive(&arn, None).await.expect("redriven");
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!((ended.status, ended.redrive_count), (RunStatus::Failed, 1));
    assert_eq!(world.functions.calls.lock().len(), 2, "only what failed ran again");
    let lines = world.lines(&arn).await;
    assert_eq!(lines.iter().filter(|line| line.ends_with("PassStateEntered")).count(), 1);
    assert!(lines.iter().any(|line| line.ends_with("ExecutionRedriven")));
}

#[tokio::test]
async fn the_same_redrive_twice_is_one_redrive() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {"A": with(task("fail"), json!({"End": true}))}});
    let arn = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    let mut dates = Vec::new();
    for (token, redrives) in [("one", 1), ("one", 1), ("two", 2), ("one", 2)] {
        world.engine.wait(&arn).await.expect("read").expect("there");
        dates.push(world.engine.redrive(&arn, Some(token)).await.expect("redriven"));
        let ended = world.engine.wait(&arn).await.expect("read").expect("there");
        assert_eq!((ended.status, ended.redrive_count), (RunStatus::Failed, redrives), "{token}");
    }
    assert_eq!((dates[0], dates[0]), (dates[1], dates[3]));
    // Without a name each is one of its own.
    world.engine.redrive(&arn, None).await.expect("redriven");
    let ended = world.engine.wait(&arn).await.expect("read").expect("there");
    assert_eq!(ended.redrive_count, 3);
}

#[tokio::test]
async fn the_same_start_twice_is_one_start() {
    let world = TestEngine::new().await;
    let activity = "arn:aws:states:us-east-1:000000000000:activity:a";
    let machine = machine(
        json!({"StartAt": "A", "States": {"A": {"Type": "Task", "Resource": activity, "End": true}}}),
        StateMachineType::Standard,
    );
    let named = |input: &str| StartRequest { name: Some("n".to_owned()), ..request(&machine, input) };
    let first = world.engine.start_execution(named("{}")).await.expect("starts");
    assert_eq!(world.engine.start_execution(named("{}")).await.expect("the same"), first);
    assert!(matches!(world.engine.start_execution(named("1")).await, Err(StartError::AlreadyExists { .. })));
    let stopped = world.engine.stop(&first.execution_arn, Some("E".to_owned()), None).await;
    assert!(stopped.is_ok());
    assert!(matches!(world.engine.start_execution(named("{}")).await, Err(StartError::AlreadyExists { .. })));
    let lines = world.lines(&first.execution_arn).await;
    assert!(lines.last().is_some_and(|line| line.ends_with(" 0 ExecutionAborted")), "{lines:?}");
}

#[tokio::test]
async fn express_runs_to_its_end() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {"A": with(task("double"), json!({"End": true}))}});
    let ended = world
        .engine
        .start_sync(request(&machine(definition, StateMachineType::Express), "4"))
        .await
        .expect("runs");
    assert_eq!(ended.output.as_deref(), Some("8"));
    assert!(ended.execution_arn.as_str().contains(":express:m:"));
}

#[tokio::test]
async fn express_executions_take_five_minutes_at_most() {
    let world = TestEngine::new().await;
    let waits = |seconds: u32| json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": seconds, "End": true}}});
    for (definition, status, seconds) in [
        (waits(299), RunStatus::Succeeded, 299),
        (waits(86_400), RunStatus::TimedOut, 300),
        (with(waits(86_400), json!({"TimeoutSeconds": 10})), RunStatus::TimedOut, 10),
    ] {
        let of = machine(definition, StateMachineType::Express);
        let ended = world.engine.start_sync(request(&of, "{}")).await.expect("runs");
        let took = ended.stop_date.expect("it ended").duration_since(ended.start_date);
        assert_eq!((ended.status, took.as_secs()), (status, seconds));
        let error = (status == RunStatus::TimedOut).then_some("States.Timeout");
        assert_eq!(ended.error.as_deref(), error);
        // No state waits for this one.
        let begun_ms = world.engine.inner.now_ms();
        let arn = world.start(&of, "{}").await;
        let ended = tokio::time::timeout(std::time::Duration::from_secs(20), world.engine.wait(&arn)).await;
        assert!(ended.expect("it ends").expect("read").is_none_or(|ended| ended.status == status));
        let took_ms = world.engine.inner.now_ms() - begun_ms;
        assert!((seconds * 1_000..seconds * 1_000 + 1_000).contains(&took_ms), "{took_ms}");
    }
}

#[tokio::test]
async fn an_endless_loop_leaves_turns_to_others() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": {"Type": "Pass", "Next": "B"},
        "B": {"Type": "Choice", "Choices": [{"Variable": "$.stop", "IsPresent": true, "Next": "C"}], "Default": "A"},
        "C": {"Type": "Succeed"}}});
    let endless = world.start(&machine(definition, StateMachineType::Standard), "{}").await;
    let other = json!({"StartAt": "A", "States": {"A": with(task("double"), json!({"End": true}))}});
    let (ended, _) = world.run(other, "1").await;
    assert_eq!(ended.status, RunStatus::Succeeded);
    world.engine.stop(&endless, None, None).await.expect("stops");
    assert_eq!(world.engine.wait(&endless).await.expect("read").expect("there").status, RunStatus::Aborted);
}

#[tokio::test]
async fn an_integration_that_is_not_there_can_be_caught() {
    let world = TestEngine::new().await;
    let definition = json!({"StartAt": "A", "States": {
        "A": {"Type": "Task", "Resource": "arn:aws:states:::sqs:sendMessage", "Parameters": {"QueueUrl": "q", "MessageBody": "m"},
            "Catch": [{"ErrorEquals": ["Mayfly.IntegrationNotSupported"], "Next": "B"}], "End": true},
        "B": {"Type": "Pass", "End": true}}});
    let (ended, _) = world.run(definition, "{}").await;
    assert_eq!(ended.status, RunStatus::Succeeded);
    assert!(ended.output.is_some_and(|output| output.contains("arn:aws:states:::sqs:sendMessage")));
}

/// The service parses an input to check it; the machine gets that value.
#[tokio::test]
async fn an_input_is_parsed_once() {
    let world = TestEngine::new().await;
    let wait = json!({"StartAt": "W", "States": {"W": {"Type": "Wait", "Seconds": 60, "End": true}}});
    let mut request = request(&machine(wait, StateMachineType::Standard), "[1]");
    request.input = JsonText::from("[1]");
    let Ok(Value::Array(checked)) = request.input.value() else { panic!("an array") };
    let _awake = world.engine.inner.busy();
    let arn = world.engine.start_execution(request).await.expect("starts").execution_arn;
    let running = world.engine.inner.live.by_arn(&arn).expect("in memory");
    let Value::Array(input) = running.lock().machine.as_ref().expect("there").facts().input.clone() else {
        panic!("an array")
    };
    assert!(Arc::ptr_eq(&checked, &input), "the value is shared");
}
