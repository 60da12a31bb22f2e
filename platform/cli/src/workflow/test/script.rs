//! Mocks for the engine: answers each call, and records the calls.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use mayfly_workflows_engine::engine::{FunctionError, MockAnswer, MockCall, Mocks};
use serde_json::Value;

use super::check::includes;
use super::file::{self, ScriptedAnswer, TestCase, TestFile};

/// The mocks of one case.
pub(super) struct MockScript {
    /// Mocks by name; a case's own have precedence over the file's.
    mocks: HashMap<String, Arc<[Scripted]>>,
    record: Mutex<MockRecord>,
}

struct Scripted {
    answer: ScriptedAnswer,
    /// The number of calls that it answers, if limited.
    times: Option<u32>,
}

/// The uses of the mocks so far.
#[derive(Default)]
struct MockRecord {
    /// The number of uses of each answer.
    used: HashMap<(String, usize), u32>,
    calls: Vec<MockCall>,
    problem: Option<String>,
}

impl MockScript {
    pub(super) fn new(file: &TestFile, case: &TestCase) -> Arc<Self> {
        let mocks = file.mocks.iter().chain(&case.mocks);
        let mocks = mocks.map(|(name, mock)| (name.clone(), scripted(mock))).collect();
        Arc::new(Self { mocks, record: Mutex::default() })
    }

    /// The first problem with the mocks.
    pub(super) fn problem(&self) -> Option<String> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).problem.clone()
    }

    /// The calls so far.
    pub(super) fn calls(&self) -> Vec<MockCall> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).calls.clone()
    }

    fn choose(&self, record: &mut MockRecord, call: &MockCall) -> Result<ScriptedAnswer, String> {
        let named = [&call.state, &call.resource].into_iter().find(|name| self.mocks.contains_key(*name));
        let Some(name) = named else {
            let state = &call.state;
            return Err(format!(
                "{state} has no mock ({}): add `{state}: {{result: …}}` under mocks, or --mock '{state}=JSON'",
                call.resource
            ));
        };
        let mut answers = self.mocks[name].iter().enumerate();
        let chosen = answers.find(|(at, scripted)| {
            let used = record.used.get(&(name.clone(), *at)).copied().unwrap_or(0);
            scripted.times.is_none_or(|times| used < times)
                && scripted.answer.when.as_ref().is_none_or(|when| includes(&call.arguments, when))
        });
        let Some((at, scripted)) = chosen else {
            let before = record.calls.iter().filter(|earlier| earlier.state == call.state).count();
            return Err(format!(
                "the mock of {name} has no answer for call {}, with the arguments {}: add one to its list, or say times",
                before + 1,
                call.arguments
            ));
        };
        *record.used.entry((name.clone(), at)).or_default() += 1;
        Ok(scripted.answer.clone())
    }
}

fn scripted(mock: &file::Mock) -> Arc<[Scripted]> {
    let one = |answer: &ScriptedAnswer| {
        let once = mock.listed && answer.when.is_none();
        Scripted { answer: answer.clone(), times: answer.times.or(once.then_some(1)) }
    };
    mock.answers.iter().map(one).collect()
}

impl Mocks for MockScript {
    fn answer(&self, call: MockCall) -> MockAnswer {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = self.choose(&mut record, &call);
        record.calls.push(call);
        match chosen {
            Ok(answer) => mock_answer(answer),
            Err(problem) => {
                // Only the first problem is reported. The task never ends, so that no catcher hides the problem.
                record.problem.get_or_insert(problem);
                MockAnswer { after: std::time::Duration::ZERO, heartbeat: None, outcome: None }
            }
        }
    }
}

fn mock_answer(answer: ScriptedAnswer) -> MockAnswer {
    let text = |value: &super::super::ordered::Ordered| serde_json::to_string(value).unwrap_or_default();
    let outcome = if let Some(result) = &answer.result {
        Some(Ok(text(result)))
    } else if let Some(payload) = &answer.payload {
        Some(Ok(format!(r#"{{"ExecutedVersion":"$LATEST","Payload":{},"StatusCode":200}}"#, text(payload))))
    } else {
        answer.error.map(|error_type| {
            let cause = match answer.cause {
                Some(Value::String(text)) => text,
                Some(other) => other.to_string(),
                None => String::new(),
            };
            Err(FunctionError::new(error_type, cause))
        })
    };
    let time = |time: Option<file::Time>| time.map(|time| time.0);
    MockAnswer { after: time(answer.after).unwrap_or_default(), heartbeat: time(answer.heartbeat), outcome }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn script(mocks: Value) -> Arc<MockScript> {
        let file = TestFile { mocks: serde_json::from_value(mocks).unwrap(), ..TestFile::default() };
        MockScript::new(&file, &TestCase::default())
    }

    fn ask(script: &MockScript, state: &str, arguments: Value) -> Option<Result<String, String>> {
        let call = MockCall { state: state.into(), resource: "arn".into(), arguments, retries: 0 };
        script.answer(call).outcome.map(|outcome| outcome.map_err(|error| error.error_type))
    }

    #[test]
    fn a_list_answers_call_by_call_and_says_when_it_is_used_up() {
        let script = script(json!({"A": [{"error": "E"}, {"result": 2, "times": 2}]}));
        assert_eq!(ask(&script, "A", json!({})), Some(Err("E".into())));
        assert_eq!(ask(&script, "A", json!({})), Some(Ok("2".into())));
        assert_eq!(ask(&script, "A", json!({})), Some(Ok("2".into())));
        assert_eq!(script.problem(), None);
        assert_eq!(ask(&script, "A", json!({})), None);
        assert!(script.problem().unwrap().contains("no answer for call 4"));
    }

    #[test]
    fn one_answer_answers_always_and_the_arguments_may_choose() {
        let script = script(json!({"A": {"result": 1}, "arn": [
            {"when": {"id": 7}, "error": "Seven"}, {"result": "any", "times": 3}]}));
        for _ in 0..3 {
            assert_eq!(ask(&script, "A", json!({})), Some(Ok("1".into())));
        }
        assert_eq!(ask(&script, "B", json!({"id": 7, "x": 1})), Some(Err("Seven".into())));
        assert_eq!(ask(&script, "B", json!({"id": 8})), Some(Ok("\"any\"".into())));
        assert_eq!(ask(&script, "B", json!({"id": 7})), Some(Err("Seven".into())));
    }

    #[test]
    fn a_task_without_a_mock_says_how_to_write_one() {
        let script = script(json!({}));
        assert_eq!(ask(&script, "Charge", json!({})), None);
        assert!(script.problem().unwrap().contains("add `Charge: {result: …}` under mocks"));
    }
}
