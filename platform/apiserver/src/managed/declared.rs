//! Checks of an applied configuration by its shape: fields that the kind does not have, and items of a list with the
//! same key. (Upstream: structured-merge-diff's `typed/validate.go`.)

use std::collections::HashSet;

use serde_json::Value;

use super::{
    set,
    typed::{Form, Shape, keys_of},
};

/// The errors about a configuration: the undeclared fields that were removed from it, at `unknown` (paths such as
/// `spec.containers[0].imagee`), and repeated items of sets and of lists with keys.
pub(super) fn errors(shape: Shape<'static>, value: &Value, unknown: &[String]) -> Vec<String> {
    let undeclared = unknown.iter().map(|path| {
        let path = element_path(shape, value, path);
        format!("{path}: field not declared in schema")
    });
    let mut errors = undeclared.collect();
    repeated(shape, value, "", &mut errors);
    errors
}

/// A path in which list items are named by their keys: `.spec.containers[name="c"].imagee`.
fn element_path(mut shape: Shape<'static>, mut value: &Value, path: &str) -> String {
    let mut shown = String::new();
    for step in path.replace('[', ".[").split('.').filter(|step| !step.is_empty()) {
        let index = step.strip_prefix('[').and_then(|step| step.strip_suffix(']')?.parse::<usize>().ok());
        let Some(index) = index else {
            shown.push_str(&format!(".{step}"));
            (shape, value) = (shape.field(step).0, &value[step]);
            continue;
        };
        let item = &value[index];
        match shape.form(value) {
            Form::Keyed(keys, items) => {
                shown.push_str(&set::readable(&keys_of(item, keys)));
                shape = items;
            }
            _ => {
                shown.push_str(step);
                shape = shape.item();
            }
        }
        value = item;
    }
    shown
}

fn repeated(shape: Shape<'static>, value: &Value, path: &str, errors: &mut Vec<String>) {
    let mut seen = HashSet::new();
    let mut check = |step: &str, errors: &mut Vec<String>| {
        if !seen.insert(step.to_owned()) {
            errors.push(format!("{path}: duplicate entries for key {}", set::readable(step)));
        }
    };
    match (shape.form(value), value) {
        (Form::Fields, Value::Object(map)) => {
            for (name, value) in map {
                repeated(shape.field(name).0, value, &format!("{path}.{name}"), errors);
            }
        }
        (Form::Set, Value::Array(list)) => {
            for item in list {
                check(&set::value(item), errors);
            }
        }
        (Form::Keyed(keys, items), Value::Array(list)) => {
            for item in list {
                let step = keys_of(item, keys);
                check(&step, errors);
                repeated(items, item, &format!("{path}{}", set::readable(&step)), errors);
            }
        }
        _ => {}
    }
}
