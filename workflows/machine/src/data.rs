//! The data of a state: applies the language's stages in the scope of a thread.

use super::ids::ThreadId;
use std::sync::Arc;

use mayfly_workflows_language::choice;
use mayfly_workflows_language::dataflow::{self, Context, EvaluationScope};
use mayfly_workflows_language::definition::{
    Catcher, ChoiceRule, Condition, DataFlow, MapState, Quantity, State, StateKind, Text,
};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::Value;

use super::context::{StateContext, context_object};
use super::error_source::ErrorSource;
use super::quantity;
use super::state::Item;
use super::turn::{StateOutput, Turn};

impl Turn<'_> {
    /// Runs an evaluation in the scope of a thread's state.
    pub(super) fn evaluate<T>(
        &self,
        number: ThreadId,
        state: &State,
        input: &Value,
        ask: impl FnOnce(&EvaluationScope<'_>) -> T,
    ) -> T {
        self.evaluate_with(number, state, input, None, None, ask)
    }

    fn evaluate_with<T>(
        &self,
        number: ThreadId,
        state: &State,
        input: &Value,
        token: Option<&Arc<str>>,
        item: Option<&Item>,
        ask: impl FnOnce(&EvaluationScope<'_>) -> T,
    ) -> T {
        let Some(thread) = self.m.threads.get(&number) else {
            unreachable!("a thread is evaluated while it runs")
        };
        let (entered_ms, retries) =
            thread.active.as_ref().map_or((self.at_ms, 0), |active| (active.entered_ms, active.retries));
        let build = || {
            let around = StateContext {
                name: &state.name,
                entered_ms,
                retries: matches!(
                    state.kind,
                    StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_)
                )
                .then_some(retries),
                item: item.or(thread.item.as_ref()),
                token,
            };
            context_object(&self.m.facts, self.m.redrive_count, self.m.redrive_ms, around)
        };
        ask(&EvaluationScope {
            input,
            result: None,
            error_output: None,
            context: Context::Build(&build),
            variables: &thread.variables,
            ambient: &self.ambient,
        })
    }

    /// The state's raw input.
    pub(super) fn raw_input(&self, number: ThreadId) -> Value {
        self.active(number).map(|active| active.input.clone()).unwrap_or_default()
    }

    /// The input after `InputPath`; in JSONata the input itself.
    pub(super) fn effective_input(&self, number: ThreadId, state: &State) -> Result<Value, StateError> {
        let raw = self.raw_input(number);
        match &state.data {
            DataFlow::JsonPath { input_path, .. } => {
                self.evaluate(number, state, &raw, |scope| dataflow::effective_input(input_path, scope))
            }
            DataFlow::Jsonata { .. } => Ok(raw),
        }
    }

    /// The value of `Parameters` or `Arguments`.
    pub(super) fn arguments(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
    ) -> Result<Value, StateError> {
        self.arguments_with(number, state, effective, None)
    }

    /// The arguments of a Task, whose token is in the context object.
    pub(super) fn task_arguments(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
        token: &Arc<str>,
    ) -> Result<Value, StateError> {
        self.arguments_with(number, state, effective, Some(token))
    }

    fn arguments_with(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
        token: Option<&Arc<str>>,
    ) -> Result<Value, StateError> {
        let (template, field) = match &state.data {
            DataFlow::JsonPath { parameters, .. } => (parameters.as_ref(), "Parameters"),
            DataFlow::Jsonata { arguments, .. } => (arguments.as_ref(), "Arguments"),
        };
        self.evaluate_with(number, state, effective, token, None, |scope| {
            dataflow::parameters(template, scope, field)
        })
    }

    /// Computes the state's output and assigned variables from its result.
    pub(super) fn finish(
        &self,
        number: ThreadId,
        state: &State,
        result: Value,
    ) -> Result<StateOutput, ErrorSource> {
        let raw = self.raw_input(number);
        match &state.data {
            DataFlow::JsonPath { result_selector, result_path, output_path, .. } => {
                let selected = self.evaluate(number, state, &result, |scope| {
                    dataflow::select_result(result_selector.as_ref(), scope, &result)
                })?;
                let assigned = self.evaluate(number, state, &selected, |scope| {
                    dataflow::assign(state.assign.as_ref(), scope, "Assign")
                })?;
                let placed = dataflow::place_result(result_path, &raw, selected)?;
                let output = self.evaluate(number, state, &placed, |scope| {
                    dataflow::effective_output(output_path, scope)
                })?;
                Ok(StateOutput { output, assigned })
            }
            DataFlow::Jsonata { output, .. } => {
                // Pass, Wait, Choice and Succeed have no result: only the input is available.
                let has_result =
                    matches!(state.kind, StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_));
                self.evaluate(number, state, &raw, |scope| {
                    let with_result = scope.with_result(&result);
                    let scope = if has_result { &with_result } else { scope };
                    let assigned = dataflow::assign(state.assign.as_ref(), scope, "Assign")?;
                    let output = dataflow::output(output.as_ref(), scope, &result, "Output")?;
                    Ok(StateOutput { output, assigned })
                })
            }
        }
    }

    /// The same for JSONPath states without a result (Wait, Succeed, Choice):
    /// `OutputPath` over the effective input.
    pub(super) fn finish_without_result(
        &self,
        number: ThreadId,
        state: &State,
        effective: Value,
    ) -> Result<StateOutput, ErrorSource> {
        let assigned = self.evaluate(number, state, &effective, |scope| {
            dataflow::assign(state.assign.as_ref(), scope, "Assign")
        })?;
        let output = self.output_path(number, state, effective)?;
        Ok(StateOutput { output, assigned })
    }

    fn output_path(&self, number: ThreadId, state: &State, value: Value) -> Result<Value, StateError> {
        match &state.data {
            DataFlow::JsonPath { output_path, .. } => {
                self.evaluate(number, state, &value, |scope| dataflow::effective_output(output_path, scope))
            }
            DataFlow::Jsonata { .. } => Ok(value),
        }
    }

    /// Whether a rule of a Choice state matches.
    pub(super) fn matches(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
        (index, rule): (usize, &ChoiceRule),
    ) -> Result<bool, StateError> {
        self.evaluate(number, state, effective, |scope| match &rule.condition {
            Condition::JsonPath(condition) => condition.matches(scope),
            Condition::Jsonata(expression) => {
                choice::condition(expression, scope, &format!("Choices[{index}]/Condition"))
            }
            Condition::Always(holds) => Ok(*holds),
        })
    }

    /// Computes a Choice's output and assigned variables: from the rule, or from the state if no rule matched.
    pub(super) fn finish_choice(
        &self,
        number: ThreadId,
        state: &State,
        effective: Value,
        rule: Option<(usize, &ChoiceRule)>,
    ) -> Result<StateOutput, ErrorSource> {
        let assign = match rule {
            Some((_, rule)) => rule.assign.as_ref(),
            None => state.assign.as_ref(),
        };
        // The path of a rule's field begins with the rule's index (measured on AWS: floci-io/floci#2689).
        let at = |field: &str| choice::field_of(rule.map(|(index, _)| index), field);
        let assigned =
            self.evaluate(number, state, &effective, |scope| dataflow::assign(assign, scope, &at("Assign")))?;
        let output = match &state.data {
            DataFlow::JsonPath { .. } => self.output_path(number, state, effective)?,
            DataFlow::Jsonata { output, .. } => {
                let own = rule.and_then(|(_, rule)| rule.output.as_ref());
                let field = if own.is_some() { at("Output") } else { "Output".to_owned() };
                self.evaluate(number, state, &effective, |scope| {
                    dataflow::output(own.or(output.as_ref()), scope, &effective, &field)
                })?
            }
        };
        Ok(StateOutput { output, assigned })
    }

    /// Applies a catcher to an error.
    pub(super) fn finish_caught(
        &self,
        number: ThreadId,
        state: &State,
        (index, catcher): (usize, &Catcher),
        error_output: &Value,
    ) -> Result<StateOutput, ErrorSource> {
        let raw = self.raw_input(number);
        match &state.data {
            DataFlow::JsonPath { .. } => {
                let assigned = self.evaluate(number, state, error_output, |scope| {
                    dataflow::assign(catcher.assign.as_ref(), scope, "Assign")
                })?;
                let output = dataflow::place_result(&catcher.result_path, &raw, error_output.clone())?;
                Ok(StateOutput { output, assigned })
            }
            DataFlow::Jsonata { .. } => self.evaluate(number, state, &raw, |scope| {
                let scope = scope.with_error_output(error_output);
                let at = |field: &str| format!("Catch[{index}]/{field}");
                let assigned = dataflow::assign(catcher.assign.as_ref(), &scope, &at("Assign"))?;
                let output = dataflow::output(catcher.output.as_ref(), &scope, error_output, &at("Output"))?;
                Ok(StateOutput { output, assigned })
            }),
        }
    }

    /// A string of a Fail state.
    pub(super) fn text(
        &self,
        number: ThreadId,
        state: &State,
        text: &Text,
        field: &str,
    ) -> Result<Arc<str>, StateError> {
        let raw = self.raw_input(number);
        match text {
            Text::Literal(text) => Ok(text.clone()),
            Text::Template(template) => {
                let field = format!("{field}Path");
                let value = self.evaluate(number, state, &raw, |scope| template.evaluate(scope, &field))?;
                value.as_str().map(Into::into).ok_or_else(|| {
                    StateError::runtime(format!(
                        "The {field} field refers to a value that is not a string: {}",
                        value.to_text()
                    ))
                })
            }
            Text::Expression(expression) => {
                let value = self.evaluate(number, state, &raw, |scope| expression.evaluate(scope, field))?;
                value
                    .as_str()
                    .map(Into::into)
                    .ok_or_else(|| expression.unexpected_type(field, "string", &value))
            }
        }
    }

    /// The items of a Map without an `ItemReader`.
    pub(super) fn map_items(
        &mut self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        effective: &Value,
    ) -> Result<Arc<Vec<Value>>, StateError> {
        let source = self.evaluate(number, state, effective, |scope| quantity::map_source(scope, map))?;
        let items = quantity::items_in(state, map, source, self.m.facts.edition);
        // AWS records MapStateFailed for items that are not an array, although no iteration has started.
        self.parts_failed |= items.is_err();
        items
    }

    /// `MaxConcurrency` and its path; 0 means no limit.
    pub(super) fn max_concurrency(
        &self,
        number: ThreadId,
        state: &State,
        map: &MapState,
        effective: &Value,
    ) -> Result<u64, StateError> {
        self.count(number, state, effective, &map.max_concurrency, "MaxConcurrency")
    }

    /// A numeric field of a Map.
    pub(super) fn count(
        &self,
        number: ThreadId,
        state: &State,
        effective: &Value,
        quantity: &Quantity<u64>,
        field: &str,
    ) -> Result<u64, StateError> {
        self.evaluate(number, state, effective, |scope| quantity::count(scope, quantity, field))
    }
}

/// `ItemSelector` for one item.
pub(super) fn select_item(
    turn: &Turn<'_>,
    number: ThreadId,
    state: &State,
    input: &Value,
    item: &Item,
    selector: &Template,
) -> Result<Value, StateError> {
    let field = match &state.data {
        DataFlow::JsonPath { .. } => "Parameters",
        DataFlow::Jsonata { .. } => "ItemSelector",
    };
    turn.evaluate_with(number, state, input, None, Some(item), |scope| selector.evaluate(scope, field))
}

/// Evaluates a template of a Map's reader, batcher or writer.
pub(super) fn template(
    turn: &Turn<'_>,
    number: ThreadId,
    state: &State,
    input: &Value,
    template: Option<&Template>,
    field: &str,
) -> Result<Value, StateError> {
    match template {
        Some(template) => turn.evaluate(number, state, input, |scope| template.evaluate(scope, field)),
        None => Ok(Value::empty_object()),
    }
}

/// The error output of a catcher: both members, empty if there is no value (LocalStack notes that AWS binds an empty
/// text).
///
/// Before edition 2 an empty cause was present only for AWS's own errors.
pub(super) fn error_output(error: Option<&Arc<str>>, cause: Option<&Arc<str>>, edition: u32) -> Value {
    let empty = match edition {
        0 | 1 => (false, error.is_some_and(|error| error.starts_with("States."))),
        _ => (true, true),
    };
    let told = |text: Option<&Arc<str>>, empty: bool| match text {
        Some(text) => Some(Value::String(text.clone())),
        None => empty.then(|| Value::from("")),
    };
    let error = told(error, empty.0).map(|error| ("Error", error));
    let cause = told(cause, empty.1).map(|cause| ("Cause", cause));
    Value::object(error.into_iter().chain(cause))
}
