//! Choice states.

use crate::choice;
use crate::definition::{ChoiceRule, ChoiceState, Condition, QueryLanguage};
use crate::value::{Map, Value};

use super::allowed::{self, foreign};
use super::fields::{EMPTY, Fields};
use super::flow::{Compiler, StateCursor};

/// Fields of a rule that are not part of its condition.
const CONSEQUENCES: &[&str] = &["Next", "Assign", "Output", "Comment"];

impl Compiler {
    pub(super) fn choice(&mut self, fields: &Fields<'_>, here: StateCursor) -> Option<ChoiceState> {
        fields.required("Choices", &mut self.report)?;
        let choices = fields.array("Choices", &mut self.report)?;
        if choices.is_empty() {
            self.report.schema(&fields.place("Choices"), EMPTY);
        }
        let mut rules = Vec::new();
        for (position, rule) in choices.iter().enumerate() {
            let at = format!("{}[{position}]", fields.place("Choices"));
            if let Some(fields) = Fields::of(rule, &at, fields.language, &mut self.report) {
                rules.extend(self.rule(&fields, here));
            }
        }
        let default = fields
            .string("Default", &mut self.report)
            .map(|name| self.leads_to(here, name, fields.place("Default")));
        (rules.len() == choices.len()).then_some(ChoiceState { rules, default })
    }

    fn rule(&mut self, fields: &Fields<'_>, here: StateCursor) -> Option<ChoiceRule> {
        let condition = match fields.jsonata() {
            true => self.jsonata_condition(fields),
            false => self.json_path_condition(fields),
        };
        fields.require(&["Next"], &mut self.report);
        let next = fields
            .string("Next", &mut self.report)
            .map(|name| self.leads_to(here, name, fields.place("Next")));
        let assign = fields.assign(&mut self.report);
        let output = if fields.jsonata() { fields.template("Output", &mut self.report) } else { None };
        let comment = fields.string("Comment", &mut self.report);
        Some(ChoiceRule { condition: condition?, next: next?, assign, output, comment })
    }

    fn jsonata_condition(&mut self, fields: &Fields<'_>) -> Option<Condition> {
        fields.only(allowed::JSONATA_RULE, &mut self.report);
        match fields.required("Condition", &mut self.report)? {
            Value::Bool(always) => Some(Condition::Always(*always)),
            _ => fields.expression("Condition", &mut self.report).map(Condition::Jsonata),
        }
    }

    fn json_path_condition(&mut self, fields: &Fields<'_>) -> Option<Condition> {
        for field in ["Condition", "Output"] {
            if fields.has(field) {
                self.report.schema(&fields.at, foreign(fields.language, field, QueryLanguage::Jsonata));
                return None;
            }
        }
        if ["And", "Or", "Not", "Variable"].iter().filter(|name| fields.has(name)).count() != 1 {
            let message =
                "The object must have only one of the following fields, [And, Or, Not, Variable, Condition]";
            self.report.schema(&fields.at, message);
            return None;
        }
        let mut sound = true;
        nested(&Value::from(fields.map.clone()), &fields.at, true, &mut |at, message| {
            self.report.schema(at, message);
            sound = false;
        });
        if !sound {
            return None;
        }
        let condition: Map = fields
            .names()
            .filter(|name| !CONSEQUENCES.contains(&&***name))
            .filter_map(|name| Some((name.clone(), fields.get(name)?.clone())))
            .collect();
        match choice::ChoiceTest::compile(&Value::from(condition)) {
            Ok(rule) => Some(Condition::JsonPath(rule)),
            Err(problems) => {
                for problem in problems {
                    self.report.schema(&format!("{}{}", fields.at, problem.location), problem.message);
                }
                None
            }
        }
    }
}

/// Checks a rule and its nested rules: only the outermost has `Next`, and compared values are selected by a path.
fn nested(rule: &Value, at: &str, outermost: bool, tell: &mut dyn FnMut(&str, &str)) {
    if !outermost && rule.get("Next").is_some() {
        tell(at, "Field 'Next' is not supported");
    }
    if rule.get("Variable").and_then(Value::as_str).is_some_and(|variable| !variable.starts_with('$')) {
        let message = "Value is not a Reference Path: Reference path didn't start with '$'";
        tell(&format!("{at}/Variable"), message);
    }
    for name in ["And", "Or"] {
        let rules = rule.get(name).and_then(Value::as_array).unwrap_or_default();
        for (position, rule) in rules.iter().enumerate() {
            nested(rule, &format!("{at}/{name}[{position}]"), false, tell);
        }
    }
    if let Some(rule) = rule.get("Not") {
        nested(rule, &format!("{at}/Not"), false, tell);
    }
}
