//! The stages of a state's data: which fields are evaluated, in which order, and what they read.
//!
//! The machine and TestState run a state's data through the same functions, those of [`StateStages`]. The machine keeps
//! only the output; TestState passes a [`StageObserver`] that keeps the data between the stages.

use std::sync::Arc;

use mayfly_workflows_language::choice;
use mayfly_workflows_language::dataflow::{self, Ambient, Context, EvaluationScope, Variables};
use mayfly_workflows_language::definition::{
    Batcher, Catcher, ChoiceRule, ChoiceState, Condition, DataFlow, FailState, MapState, PassState, Quantity,
    State, StateKind, Text, Transition,
};
use mayfly_workflows_language::error::StateError;
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::{Map, Value};

use super::quantity;

/// A stage of a state's data, named as in TestState.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DataStage {
    /// The raw input.
    Input,
    /// After `InputPath`.
    AfterInputPath,
    /// After `Parameters`.
    AfterParameters,
    /// After `Arguments`.
    AfterArguments,
    /// After `ItemsPath`.
    AfterItemsPath,
    /// After the `ItemsPointer` of a reader.
    AfterItemsPointer,
    /// After `ItemSelector`.
    AfterItemSelector,
    /// After `ItemBatcher`.
    AfterItemBatcher,
    /// The result of a task or a Pass.
    Result,
    /// After `ResultSelector`.
    AfterResultSelector,
    /// After `ResultPath`.
    AfterResultPath,
    /// The variables after `Assign`.
    Variables,
}

impl DataStage {
    /// The API's name of the member that has the stage's value.
    pub fn as_str(self) -> &'static str {
        match self {
            DataStage::Input => "input",
            DataStage::AfterInputPath => "afterInputPath",
            DataStage::AfterParameters => "afterParameters",
            DataStage::AfterArguments => "afterArguments",
            DataStage::AfterItemsPath => "afterItemsPath",
            DataStage::AfterItemsPointer => "afterItemsPointer",
            DataStage::AfterItemSelector => "afterItemSelector",
            DataStage::AfterItemBatcher => "afterItemBatcher",
            DataStage::Result => "result",
            DataStage::AfterResultSelector => "afterResultSelector",
            DataStage::AfterResultPath => "afterResultPath",
            DataStage::Variables => "variables",
        }
    }
}

/// Receives the data between stages.
pub trait StageObserver {
    /// The value of a stage, which is computed once.
    fn observe(&mut self, stage: DataStage, value: &Value);
}

/// Keeps nothing.
#[derive(Debug)]
pub struct Unobserved;

impl StageObserver for Unobserved {
    fn observe(&mut self, _stage: DataStage, _value: &Value) {}
}

/// A state's output and its assigned variables.
#[derive(Clone, PartialEq)]
pub struct StateOutput {
    /// The output.
    pub output: Value,
    /// The variables that the state assigns, in the order of `Assign`.
    pub assigned: Map,
}

impl std::fmt::Debug for StateOutput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateOutput").finish_non_exhaustive()
    }
}

/// The transition of a Choice state.
pub struct ChosenTransition<'a> {
    /// The state's output and its assigned variables.
    pub left: StateOutput,
    /// The state that follows.
    pub next: &'a Transition,
    /// The rule that matched; none for `Default`.
    pub rule: Option<&'a ChoiceRule>,
}

impl std::fmt::Debug for ChosenTransition<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChosenTransition").field("next", &self.next).finish_non_exhaustive()
    }
}

/// The limits of the batches of a Map, and what each batch contains beside its items.
pub struct BatchLimits {
    /// The maximum number of items.
    pub count_max: u64,
    /// The maximum size of a batch's input, in bytes.
    pub bytes_max: u64,
    /// The value of `BatchInput`.
    pub batch_input: Option<Value>,
}

impl std::fmt::Debug for BatchLimits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchLimits")
            .field("count_max", &self.count_max)
            .field("bytes_max", &self.bytes_max)
            .finish_non_exhaustive()
    }
}

/// The data of one visit of a state.
#[derive(Clone, Copy)]
pub struct StateStages<'a> {
    /// The state.
    pub state: &'a State,
    /// The state's raw input.
    pub input: &'a Value,
    /// The context object.
    pub context: Context<'a>,
    /// The variables before the state.
    pub variables: &'a Variables,
    /// The clock and randomness of the evaluations.
    pub ambient: &'a Ambient,
}

impl std::fmt::Debug for StateStages<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateStages").field("state", &self.state.name).finish_non_exhaustive()
    }
}

impl<'a> StateStages<'a> {
    /// The data that an evaluation reads, where `$` and `$states.input` are `input`.
    pub fn scope<'b>(&'b self, input: &'b Value) -> EvaluationScope<'b> {
        EvaluationScope {
            input,
            result: None,
            error_output: None,
            context: self.context,
            variables: self.variables,
            ambient: self.ambient,
        }
    }

    /// The input after `InputPath`; in JSONata the input itself.
    pub fn effective_input(&self, observer: &mut dyn StageObserver) -> Result<Value, StateError> {
        let DataFlow::JsonPath { input_path, .. } = &self.state.data else { return Ok(self.input.clone()) };
        let effective = dataflow::effective_input(input_path, &self.scope(self.input))?;
        observer.observe(DataStage::AfterInputPath, &effective);
        Ok(effective)
    }

    /// The value of `Parameters` or `Arguments`.
    pub fn arguments(
        &self,
        effective: &Value,
        observer: &mut dyn StageObserver,
    ) -> Result<Value, StateError> {
        let (template, field, stage) = match &self.state.data {
            DataFlow::JsonPath { parameters, .. } => {
                (parameters.as_ref(), "Parameters", DataStage::AfterParameters)
            }
            DataFlow::Jsonata { arguments, .. } => {
                (arguments.as_ref(), "Arguments", DataStage::AfterArguments)
            }
        };
        let arguments = dataflow::parameters(template, &self.scope(effective), field)?;
        observer.observe(stage, &arguments);
        Ok(arguments)
    }

    /// The output and the assigned variables of a Pass.
    pub fn pass(
        &self,
        pass: &PassState,
        observer: &mut dyn StageObserver,
    ) -> Result<StateOutput, StateError> {
        let effective = self.effective_input(observer)?;
        let result = match &pass.result {
            Some(result) => {
                observer.observe(DataStage::Result, result);
                result.clone()
            }
            None => self.arguments(&effective, observer)?,
        };
        self.finish(&result, observer)
    }

    /// The output and the assigned variables of a state with a result.
    pub fn finish(
        &self,
        result: &Value,
        observer: &mut dyn StageObserver,
    ) -> Result<StateOutput, StateError> {
        match &self.state.data {
            DataFlow::JsonPath { result_selector, result_path, output_path, .. } => {
                let selected =
                    dataflow::select_result(result_selector.as_ref(), &self.scope(result), result)?;
                observer.observe(DataStage::AfterResultSelector, &selected);
                let assigned =
                    dataflow::assign(self.state.assign.as_ref(), &self.scope(&selected), "Assign")?;
                let placed = dataflow::place_result(result_path, self.input, selected)?;
                observer.observe(DataStage::AfterResultPath, &placed);
                let output = dataflow::effective_output(output_path, &self.scope(&placed))?;
                Ok(StateOutput { output, assigned })
            }
            DataFlow::Jsonata { output, .. } => {
                let scope = self.scope(self.input);
                // Pass, Wait, Choice and Succeed have no result: only the input is available.
                let has_result = matches!(
                    self.state.kind,
                    StateKind::Task(_) | StateKind::Parallel(_) | StateKind::Map(_)
                );
                let scope = if has_result { scope.with_result(result) } else { scope };
                let assigned = dataflow::assign(self.state.assign.as_ref(), &scope, "Assign")?;
                let output = dataflow::output(output.as_ref(), &scope, result, "Output")?;
                Ok(StateOutput { output, assigned })
            }
        }
    }

    /// The output and the assigned variables of a state without a result (Wait, Succeed).
    pub fn finish_without_result(&self, effective: &Value) -> Result<StateOutput, StateError> {
        match &self.state.data {
            DataFlow::JsonPath { output_path, .. } => {
                let scope = self.scope(effective);
                let assigned = dataflow::assign(self.state.assign.as_ref(), &scope, "Assign")?;
                let output = dataflow::effective_output(output_path, &scope)?;
                Ok(StateOutput { output, assigned })
            }
            DataFlow::Jsonata { .. } => self.finish(effective, &mut Unobserved),
        }
    }

    /// The transition of a Choice state: by the first rule that matches, or by `Default`.
    ///
    /// # Errors
    /// An evaluation fails, or no rule matches and there is no `Default`.
    pub fn choose<'b>(
        &self,
        choice: &'b ChoiceState,
        effective: &Value,
    ) -> Result<ChosenTransition<'b>, StateError> {
        for (index, rule) in choice.rules.iter().enumerate() {
            if self.matches(effective, (index, rule))? {
                let left = self.finish_choice(effective, Some((index, rule)))?;
                return Ok(ChosenTransition { left, next: &rule.next, rule: Some(rule) });
            }
        }
        let Some(next) = &choice.default else {
            // AWS's actual error name, not `States.NoChoiceMatched` (measured: floci-io/floci#3167).
            return Err(StateError::runtime(
                "Failed to transition out of the state. The state does not point to a next state.",
            ));
        };
        Ok(ChosenTransition { left: self.finish_choice(effective, None)?, next, rule: None })
    }

    /// Whether a rule of a Choice state matches.
    fn matches(&self, effective: &Value, (index, rule): (usize, &ChoiceRule)) -> Result<bool, StateError> {
        let scope = self.scope(effective);
        match &rule.condition {
            Condition::JsonPath(condition) => condition.matches(&scope),
            Condition::Jsonata(expression) => {
                choice::condition(expression, &scope, &format!("Choices[{index}]/Condition"))
            }
            Condition::Always(holds) => Ok(*holds),
        }
    }

    /// A Choice's output and assigned variables: from the rule, or from the state if no rule matched.
    fn finish_choice(
        &self,
        effective: &Value,
        rule: Option<(usize, &ChoiceRule)>,
    ) -> Result<StateOutput, StateError> {
        let assign = match rule {
            Some((_, rule)) => rule.assign.as_ref(),
            None => self.state.assign.as_ref(),
        };
        // The path of a rule's field begins with the rule's index (measured on AWS: floci-io/floci#2689).
        let at = |field: &str| choice::field_of(rule.map(|(index, _)| index), field);
        let scope = self.scope(effective);
        let assigned = dataflow::assign(assign, &scope, &at("Assign"))?;
        let output = match &self.state.data {
            DataFlow::JsonPath { output_path, .. } => dataflow::effective_output(output_path, &scope)?,
            DataFlow::Jsonata { output, .. } => {
                let own = rule.and_then(|(_, rule)| rule.output.as_ref());
                let field = if own.is_some() { at("Output") } else { "Output".to_owned() };
                dataflow::output(own.or(output.as_ref()), &scope, effective, &field)?
            }
        };
        Ok(StateOutput { output, assigned })
    }

    /// The output and the assigned variables of a state whose error a catcher handles.
    pub fn finish_caught(
        &self,
        (index, catcher): (usize, &Catcher),
        error_output: &Value,
    ) -> Result<StateOutput, StateError> {
        match &self.state.data {
            DataFlow::JsonPath { .. } => {
                let assigned =
                    dataflow::assign(catcher.assign.as_ref(), &self.scope(error_output), "Assign")?;
                let output = dataflow::place_result(&catcher.result_path, self.input, error_output.clone())?;
                Ok(StateOutput { output, assigned })
            }
            DataFlow::Jsonata { .. } => {
                let scope = self.scope(self.input).with_error_output(error_output);
                let at = |field: &str| format!("Catch[{index}]/{field}");
                let assigned = dataflow::assign(catcher.assign.as_ref(), &scope, &at("Assign"))?;
                let output = dataflow::output(catcher.output.as_ref(), &scope, error_output, &at("Output"))?;
                Ok(StateOutput { output, assigned })
            }
        }
    }

    /// The error and the cause of a Fail state.
    pub fn failure(&self, fail: &FailState) -> Result<(Option<Arc<str>>, Option<Arc<str>>), StateError> {
        let error = fail.error.as_ref().map(|text| self.text(text, "Error")).transpose()?;
        let cause = fail.cause.as_ref().map(|text| self.text(text, "Cause")).transpose()?;
        Ok((error, cause))
    }

    /// A string of a Fail state.
    fn text(&self, text: &Text, field: &str) -> Result<Arc<str>, StateError> {
        let scope = self.scope(self.input);
        match text {
            Text::Literal(text) => Ok(text.clone()),
            Text::Template(template) => {
                let value = template.evaluate(&scope, &format!("{field}Path"))?;
                value.as_str().map(Into::into).ok_or_else(|| {
                    StateError::runtime(format!(
                        "The {field}Path field refers to a value that is not a string: {}",
                        value.to_text()
                    ))
                })
            }
            Text::Expression(expression) => {
                let value = expression.evaluate(&scope, field)?;
                value
                    .as_str()
                    .map(Into::into)
                    .ok_or_else(|| expression.unexpected_type(field, "string", &value))
            }
        }
    }

    /// The value in which a Map without an `ItemReader` looks for its items; see [`quantity::items_in`].
    pub fn map_source(
        &self,
        map: &MapState,
        effective: &Value,
        observer: &mut dyn StageObserver,
    ) -> Result<Value, StateError> {
        let source = quantity::map_source(&self.scope(effective), map)?;
        if matches!(self.state.data, DataFlow::JsonPath { .. }) {
            observer.observe(DataStage::AfterItemsPath, &source);
        }
        Ok(source)
    }

    /// `ItemSelector` for the item that the context object has.
    pub fn select_item(&self, selector: &Template, effective: &Value) -> Result<Value, StateError> {
        let field = match &self.state.data {
            DataFlow::JsonPath { .. } => "Parameters",
            DataFlow::Jsonata { .. } => "ItemSelector",
        };
        selector.evaluate(&self.scope(effective), field)
    }

    /// The limits of `ItemBatcher`.
    pub fn batch_limits(&self, batcher: &Batcher, effective: &Value) -> Result<BatchLimits, StateError> {
        let scope = self.scope(effective);
        let limit = |quantity: &Option<Quantity<u64>>, field| match quantity {
            Some(quantity) => match quantity::count(&scope, quantity, field) {
                Ok(0) => Err(StateError::runtime(format!("{field} must be greater than 0."))),
                other => other,
            },
            None => Ok(u64::MAX),
        };
        Ok(BatchLimits {
            count_max: limit(&batcher.max_items_per_batch, "MaxItemsPerBatch")?,
            bytes_max: limit(&batcher.max_input_bytes_per_batch, "MaxInputBytesPerBatch")?,
            batch_input: match &batcher.batch_input {
                Some(template) => Some(template.evaluate(&scope, "BatchInput")?),
                None => None,
            },
        })
    }

    /// A template of a Map's reader or writer; an empty object without one.
    pub fn template(
        &self,
        template: Option<&Template>,
        effective: &Value,
        field: &str,
    ) -> Result<Value, StateError> {
        match template {
            Some(template) => template.evaluate(&self.scope(effective), field),
            None => Ok(Value::empty_object()),
        }
    }
}

/// The error output of a catcher: both members, empty if there is no value (LocalStack notes that AWS binds an empty
/// text).
pub fn error_output(error: Option<&Arc<str>>, cause: Option<&Arc<str>>) -> Value {
    let member =
        |text: Option<&Arc<str>>| text.map_or_else(|| Value::from(""), |text| Value::String(text.clone()));
    Value::object([("Error", member(error)), ("Cause", member(cause))])
}
