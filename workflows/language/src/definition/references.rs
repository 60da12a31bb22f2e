//! Which variables each state mentions, for `variableReferences` of
//! DescribeStateMachine and DescribeStateMachineForExecution.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{
    Batcher, Catcher, Condition, DataFlow, Fail, ItemReader, Items, Kind, Map, PathField, Quantity,
    ResultWriter, Rule, State, StateMachine, Text, TimestampField, Wait,
};
use crate::jsonata::Expression;
use crate::path::Path;
use crate::template::Template;

/// The variables each state mentions, by the state's name; states that mention none
/// are left out, both levels are sorted, as AWS answers it (and leaves the field
/// out when nothing is mentioned at all).
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

#[derive(Default)]
struct Mentions {
    names: BTreeSet<Arc<str>>,
}

impl Mentions {
    fn path(&mut self, path: &Path) {
        path.variables(&mut |name| _ = self.names.insert(name.into()));
    }

    fn template(&mut self, template: Option<&Template>) {
        if let Some(template) = template {
            template.variables(&mut |name| _ = self.names.insert(name.into()));
        }
    }

    fn expression(&mut self, expression: &Expression) {
        expression.variables(&mut |name| _ = self.names.insert(name.into()));
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

    fn kind(&mut self, kind: &Kind) {
        match kind {
            Kind::Pass(_) | Kind::Succeed | Kind::Parallel(_) => {}
            Kind::Task(task) => {
                self.quantity(task.timeout.as_ref());
                self.quantity(task.heartbeat.as_ref());
                self.template(task.credentials.as_ref());
            }
            Kind::Choice(choice) => {
                for Rule { condition, assign, output, .. } in &choice.rules {
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
            Kind::Wait(Wait::Seconds(seconds)) => self.quantity(Some(seconds)),
            Kind::Wait(Wait::Timestamp(TimestampField::Path(path))) => self.path(path),
            Kind::Wait(Wait::Timestamp(TimestampField::Expression(expression))) => {
                self.expression(expression)
            }
            Kind::Wait(Wait::Timestamp(TimestampField::Value(..))) => {}
            Kind::Fail(Fail { error, cause }) => {
                for text in [error, cause].into_iter().flatten() {
                    match text {
                        Text::Literal(_) => {}
                        Text::Template(template) => self.template(Some(template)),
                        Text::Expression(expression) => self.expression(expression),
                    }
                }
            }
            Kind::Map(map) => self.map(map),
        }
    }

    fn map(&mut self, map: &Map) {
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
