//! The encoded state of a machine, so that resuming does not replay all records.
//!
//! Values are stored as text, because other representations lose the spelling of numbers.

use super::event::ReportedEnd;
use super::ids::{EffectId, MapRunId, ThreadId, TimerId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use mayfly_workflows_language::definition::{Resource, StateMachine};
use mayfly_workflows_language::value::Value;
use serde::{Deserialize, Serialize};

use super::call::{ExecutionOutcome, TaskCall};
use super::state::{Facts, FailureSnapshot, Machine, MapRunState, Thread, Timer};

/// Incremented when the format changes: a checkpoint of another format is ignored, and the execution is recomputed from
/// its records.
const FORM: u32 = 1;

#[derive(Serialize)]
struct Written<'a> {
    form: u32,
    machine: &'a Machine,
}

#[derive(Deserialize)]
struct Read {
    form: u32,
    machine: State,
}

/// [`Machine`] without the fields that the execution's row has.
#[derive(Deserialize)]
struct State {
    outcome: Option<ExecutionOutcome>,
    next_event: u64,
    next_number: u32,
    threads: BTreeMap<ThreadId, Thread>,
    timers: BTreeMap<TimerId, Timer>,
    effects: BTreeMap<EffectId, ThreadId>,
    runs: BTreeMap<MapRunId, MapRunState>,
    ready: VecDeque<ThreadId>,
    #[serde(default)]
    reported: VecDeque<(EffectId, ReportedEnd)>,
    redrive_count: u32,
    redrive_ms: Option<i64>,
    #[serde(default)]
    redrive_tokens: VecDeque<(String, i64)>,
    // Some development builds wrote `failed_snapshot`.
    #[serde(rename = "failed_in", alias = "failed_snapshot")]
    failed_snapshot: Option<FailureSnapshot>,
}

impl Machine {
    /// Encodes the state after the last event.
    pub fn checkpoint(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec(&Written { form: FORM, machine: self })
    }

    /// Decodes the machine; `None` if the checkpoint cannot be read, with the reason in the log.
    pub fn from_checkpoint(facts: Arc<Facts>, definition: Arc<StateMachine>, body: &[u8]) -> Option<Self> {
        let read: Read = match serde_json::from_slice(body) {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!(execution = %facts.arn, %error, "cannot read a checkpoint; replaying all records");
                return None;
            }
        };
        let state = (read.form == FORM).then_some(read.machine)?;
        Some(Self {
            facts,
            definition,
            outcome: state.outcome,
            next_event: state.next_event,
            next_number: state.next_number,
            threads: state.threads,
            timers: state.timers,
            effects: state.effects,
            runs: state.runs,
            ready: state.ready,
            reported: state.reported,
            redrive_count: state.redrive_count,
            redrive_ms: state.redrive_ms,
            redrive_tokens: state.redrive_tokens,
            failed_snapshot: state.failed_snapshot,
        })
    }
}

/// A task's work; its resource is parsed from its ARN.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredCall {
    arn: String,
    arguments: Text,
    token: String,
    submitted: Option<Text>,
}

impl From<TaskCall> for StoredCall {
    fn from(call: TaskCall) -> Self {
        let TaskCall { arn, arguments, token, submitted, .. } = call;
        let submitted = submitted.map(Text);
        Self { arn: arn.to_string(), arguments: Text(arguments), token: token.to_string(), submitted }
    }
}

impl TryFrom<StoredCall> for TaskCall {
    type Error = String;

    fn try_from(stored: StoredCall) -> Result<Self, String> {
        let StoredCall { arn, arguments, token, submitted } = stored;
        let resource = Resource::parse(&arn).map_err(|_| format!("{arn} is not a resource"))?;
        let submitted = submitted.map(|text| text.0);
        Ok(Self { resource, arn: arn.into(), arguments: arguments.0, token: token.into(), submitted })
    }
}

/// Serialises a value as its text.
struct Text(Value);

impl Serialize for Text {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        exact::serialize(&self.0, serializer)
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        exact::deserialize(deserializer).map(Text)
    }
}

/// Serialises a shared text.
pub(super) mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        text: &Arc<str>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Into::into)
    }
}

/// Serialises an optional shared text.
pub(super) mod maybe_shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        text: &Option<Arc<str>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        text.as_deref().serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<Arc<str>>, D::Error> {
        Ok(Option::<String>::deserialize(deserializer)?.map(Into::into))
    }
}

/// Serialises the results of a map run's children.
pub(super) mod results {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    use super::super::call::ChildResult;

    pub(in super::super) fn serialize<S: Serializer>(
        results: &Arc<Vec<ChildResult>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(results.iter())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<Vec<ChildResult>>, D::Error> {
        Vec::deserialize(deserializer).map(Arc::new)
    }
}

/// Serialises a value.
pub(super) mod exact {
    use mayfly_workflows_language::value::Value;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(in super::super) fn serialize<S: Serializer>(
        value: &Value,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&value.to_text())
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Value, D::Error> {
        let text = String::deserialize(deserializer)?;
        Value::parse(&text).map_err(|error| D::Error::custom(error.to_string()))
    }
}

/// Serialises values of which some are missing.
pub(super) mod options {
    use mayfly_workflows_language::value::Value;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Text;

    pub(in super::super) fn serialize<S: Serializer>(
        values: &[Option<Value>],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| value.clone().map(Text)))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Vec<Option<Value>>, D::Error> {
        let texts = Vec::<Option<Text>>::deserialize(deserializer)?;
        Ok(texts.into_iter().map(|text| text.map(|text| text.0)).collect())
    }
}

/// Serialises shared values.
pub(super) mod all {
    use std::sync::Arc;

    use mayfly_workflows_language::value::Value;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Text;

    pub(in super::super) fn serialize<S: Serializer>(
        values: &Arc<Vec<Value>>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(values.iter().map(|value| Text(value.clone())))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<Vec<Value>>, D::Error> {
        let texts = Vec::<Text>::deserialize(deserializer)?;
        Ok(Arc::new(texts.into_iter().map(|text| text.0).collect()))
    }
}

/// Serialises a state to enter, with its input.
pub(super) mod next {
    use mayfly_workflows_language::definition::StateId;
    use mayfly_workflows_language::value::Value;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    use super::Text;

    pub(in super::super) fn serialize<S: Serializer>(
        next: &Option<(StateId, Value)>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        next.as_ref().map(|(state, input)| (*state, Text(input.clone()))).serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<(StateId, Value)>, D::Error> {
        let next = Option::<(StateId, Text)>::deserialize(deserializer)?;
        Ok(next.map(|(state, input)| (state, input.0)))
    }
}

/// Serialises variables, from the outermost scope inwards.
pub(super) mod variables {
    use mayfly_workflows_language::dataflow::Variables;
    use mayfly_workflows_language::value::Value;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    use super::Text;

    pub(in super::super) fn serialize<S: Serializer>(
        variables: &Variables,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let mut scopes = Vec::new();
        let mut scope = Some(variables);
        while let Some(inner) = scope {
            scopes.push(Text(Value::from(inner.own().clone())));
            scope = inner.outer();
        }
        scopes.reverse();
        serializer.collect_seq(scopes)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Variables, D::Error> {
        let scopes = Vec::<Text>::deserialize(deserializer)?;
        let mut variables: Option<Variables> = None;
        for Text(scope) in scopes {
            let own = scope.as_object().ok_or_else(|| D::Error::custom("a scope is an object"))?.clone();
            variables = Some(match variables {
                None => Variables::of(own),
                Some(outer) => outer.inner().assign(&own),
            });
        }
        Ok(variables.unwrap_or_default())
    }
}
