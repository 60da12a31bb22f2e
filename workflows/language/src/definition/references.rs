//! What the paths, templates and expressions of states refer to: the variables, for `variableReferences` of
//! DescribeStateMachine and DescribeStateMachineForExecution, and whether any expression may take long.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{
    Batcher, Catcher, ChoiceRule, Condition, DataFlow, FailState, ItemReader, Items, MapState, PathField,
    Quantity, ResultWriter, State, StateKind, StateMachine, Text, TimestampField, WaitState,
};
use crate::jsonata::Expression;
use crate::path::Path;
use crate::template::Template;

/// The variables that each state references, by the state's name. States without references are omitted, and both
/// levels are sorted, as in AWS's response (which omits the field if it is empty).
pub fn variable_references(machine: &StateMachine) -> Vec<(Arc<str>, Vec<Arc<str>>)> {
    let mut all = BTreeMap::new();
    for state in machine.states() {
        let mut mentions = Mentions::default();
        mentions.state(state);
        if !mentions.names.is_empty() {
            all.insert(state.name.clone(), mentions.names.into_iter().collect());
        }
    }
    all.into_iter().collect()
}

/// Whether any expression of these states is not [light](Expression::is_light).
pub(super) fn has_long_expressions(states: &[State]) -> bool {
    let mut mentions = Mentions::default();
    states.iter().for_each(|state| mentions.state(state));
    mentions.long_expressions
}

#[derive(Default)]
struct Mentions {
    names: BTreeSet<Arc<str>>,
    long_expressions: bool,
}

impl Mentions {
    fn path(&mut self, path: &Path) {
        path.variables(&mut |name| _ = self.names.insert(name.into()));
    }

    fn template(&mut self, template: Option<&Template>) {
        if let Some(template) = template {
            template.variables(&mut |name| _ = self.names.insert(name.into()));
            self.long_expressions |= !template.is_light();
        }
    }

    fn expression(&mut self, expression: &Expression) {
        expression.variables(&mut |name| _ = self.names.insert(name.into()));
        self.long_expressions |= !expression.is_light();
    }

    fn path_field(&mut self, field: &PathField) {
        if let PathField::Path(path) = field {
            self.path(path);
        }
    }

    fn quantity<T>(&mut self, quantity: Option<&Quantity<T>>) {
        match quantity {
            Some(Quantity::Path(path)) => self.path(path),
            Some(Quantity::Expression(expression)) => self.expression(expression),
            Some(Quantity::Value(_)) | None => {}
        }
    }

    fn state(&mut self, state: &State) {
        match &state.data {
            DataFlow::JsonPath { input_path, parameters, result_selector, result_path: _, output_path } => {
                self.path_field(input_path);
                self.template(parameters.as_ref());
                self.template(result_selector.as_ref());
                self.path_field(output_path);
            }
            DataFlow::Jsonata { arguments, output } => {
                self.template(arguments.as_ref());
                self.template(output.as_ref());
            }
        }
        self.template(state.assign.as_ref());
        for Catcher { assign, output, .. } in &state.catch {
            self.template(assign.as_ref());
            self.template(output.as_ref());
        }
        self.kind(&state.kind);
    }

    fn kind(&mut self, kind: &StateKind) {
        match kind {
            StateKind::Pass(_) | StateKind::Succeed | StateKind::Parallel(_) => {}
            StateKind::Task(task) => {
                self.quantity(task.timeout.as_ref());
                self.quantity(task.heartbeat.as_ref());
                self.template(task.credentials.as_ref());
            }
            StateKind::Choice(choice) => {
                for ChoiceRule { condition, assign, output, .. } in &choice.rules {
                    match condition {
                        Condition::JsonPath(rule) => {
                            rule.variables(&mut |name| _ = self.names.insert(name.into()))
                        }
                        Condition::Jsonata(expression) => self.expression(expression),
                        Condition::Always(_) => {}
                    }
                    self.template(assign.as_ref());
                    self.template(output.as_ref());
                }
            }
            StateKind::Wait(WaitState::Seconds(seconds)) => self.quantity(Some(seconds)),
            StateKind::Wait(WaitState::Timestamp(TimestampField::Path(path))) => self.path(path),
            StateKind::Wait(WaitState::Timestamp(TimestampField::Expression(expression))) => {
                self.expression(expression)
            }
            StateKind::Wait(WaitState::Timestamp(TimestampField::Value(..))) => {}
            StateKind::Fail(FailState { error, cause }) => {
                for text in [error, cause].into_iter().flatten() {
                    match text {
                        Text::Literal(_) => {}
                        Text::Template(template) => self.template(Some(template)),
                        Text::Expression(expression) => self.expression(expression),
                    }
                }
            }
            StateKind::Map(map) => self.map(map),
        }
    }

    fn map(&mut self, map: &MapState) {
        match &map.items {
            Items::Whole => {}
            Items::Path(path) => self.path(path),
            Items::Template(template) => self.template(Some(template)),
        }
        if let Some(ItemReader { arguments, max_items, .. }) = &map.item_reader {
            self.template(arguments.as_ref());
            self.quantity(max_items.as_ref());
        }
        self.template(map.item_selector.as_ref());
        if let Some(Batcher { batch_input, max_items_per_batch, max_input_bytes_per_batch }) =
            &map.item_batcher
        {
            self.template(batch_input.as_ref());
            self.quantity(max_items_per_batch.as_ref());
            self.quantity(max_input_bytes_per_batch.as_ref());
        }
        if let Some(ResultWriter { arguments, .. }) = &map.result_writer {
            self.template(arguments.as_ref());
        }
        self.quantity(Some(&map.max_concurrency));
        self.quantity(map.tolerated_failure_count.as_ref());
        self.quantity(map.tolerated_failure_percentage.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::StateMachineType;
    use crate::parse::compile;

    fn references(text: &str) -> Vec<(String, Vec<String>)> {
        let machine = compile(text, StateMachineType::Standard).expect("a sound definition");
        let owned = |names: Vec<Arc<str>>| names.iter().map(ToString::to_string).collect();
        variable_references(&machine)
            .into_iter()
            .map(|(state, names)| (state.to_string(), owned(names)))
            .collect()
    }

    fn expected(all: &[(&str, &[&str])]) -> Vec<(String, Vec<String>)> {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        all.iter().map(|(state, names)| (state.to_string(), owned(names))).collect()
    }

    #[test]
    fn json_path_states() {
        let text = r#"{"StartAt":"T","States":{
            "T":{"Type":"Task","Resource":"arn:aws:states:::lambda:invoke","TimeoutSecondsPath":"$limit",
                 "Parameters":{"FunctionName.$":"$f.name","Payload":{"text":"$no","x.$":"States.Array($b, $$.a, $.c)"}},
                 "ResultSelector":{"r.$":"$a[0]"},"OutputPath":"$out","Next":"C",
                 "Catch":[{"ErrorEquals":["States.ALL"],"Assign":{"set.$":"$old"},"Next":"F"}]},
            "C":{"Type":"Choice","Default":"F","Choices":[{"Not":{"Variable":"$v","StringEqualsPath":"$w"},"Next":"M"}]},
            "M":{"Type":"Map","ItemsPath":"$list","MaxConcurrencyPath":"$most","End":true,
                 "ItemProcessor":{"StartAt":"W","States":{"W":{"Type":"Wait","SecondsPath":"$s","End":true}}}},
            "F":{"Type":"Fail","ErrorPath":"$e","CausePath":"States.Format('{}', $c)"}}}"#;
        assert_eq!(
            references(text),
            expected(&[
                ("C", &["v", "w"]),
                ("F", &["c", "e"]),
                ("M", &["list", "most"]),
                ("T", &["a", "b", "f", "limit", "old", "out"]),
                ("W", &["s"]),
            ])
        );
    }

    #[test]
    fn jsonata_states() {
        let text = r#"{"QueryLanguage":"JSONata","StartAt":"P","States":{
            "P":{"Type":"Pass","Output":"{% ($own := $a; $map($list, function($x) { $x + $own + $states.input.n })) %}",
                 "Assign":{"b":"{% $uuid() & $c %}"},"Next":"C"},
            "C":{"Type":"Choice","Choices":[{"Condition":"{% $b = 'x' %}","Output":"{% $d %}","Next":"S"}],
                 "Default":"S"},
            "S":{"Type":"Succeed","Output":{"constant":"$no"}}}}"#;
        assert_eq!(references(text), expected(&[("C", &["b", "d"]), ("P", &["a", "c", "list"])]));
    }

    #[test]
    fn long_expressions_are_found_in_every_field() {
        let long = "{% $map([1..9], function($n) { $n }) %}";
        let is_long = |state: serde_json::Value| {
            let text =
                serde_json::json!({"QueryLanguage": "JSONata", "StartAt": "A", "States": {"A": state}});
            let machine = compile(&text.to_string(), StateMachineType::Standard).expect("a sound definition");
            machine.has_long_expressions()
        };
        let light = "{% $states.input.a + 1 %}";
        for (output, expected) in [(long, true), (light, false)] {
            let items = format!("{{% [{}] %}}", &output[2..output.len() - 2]);
            for state in [
                serde_json::json!({"Type": "Pass", "End": true, "Output": {"a": [output]}}),
                serde_json::json!({"Type": "Pass", "End": true, "Assign": {"a": output}}),
                serde_json::json!({"Type": "Wait", "End": true, "Seconds": output}),
                serde_json::json!({"Type": "Fail", "Cause": output}),
                serde_json::json!({"Type": "Map", "End": true, "Items": items, "ItemProcessor": {
                    "StartAt": "B", "States": {"B": {"Type": "Succeed"}}}}),
                serde_json::json!({"Type": "Map", "End": true, "ItemProcessor": {
                    "StartAt": "B", "States": {"B": {"Type": "Succeed", "Output": output}}}}),
            ] {
                assert_eq!(is_long(state.clone()), expected, "{state}");
            }
        }
    }
}
