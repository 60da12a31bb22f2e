//! One function per stage, so that a caller can keep the intermediate data, which TestState returns.
//!
//! JSONPath: `InputPath` → `Parameters` → the state → `ResultSelector` → `ResultPath` → `OutputPath`. JSONata:
//! `Arguments` → the state → `Output`. `Assign` and `Output` both read the variables' values from before the state.

use super::EvaluationScope;
use crate::definition::{PathField, ResultPath};
use crate::error::{StateError, names};
use crate::path::Root;
use crate::template::{Template, within_depth};
use crate::value::{Map, Value};

/// `InputPath`: the part of the input that the state processes. `scope.input` is the raw input.
pub fn effective_input(field: &PathField, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
    select(field, scope)
}

/// `OutputPath`: selects the output. `scope.input` is the result of `ResultPath`.
pub fn effective_output(field: &PathField, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
    select(field, scope)
}

fn select(field: &PathField, scope: &EvaluationScope<'_>) -> Result<Value, StateError> {
    match field {
        PathField::Whole => Ok(scope.input.clone()),
        PathField::Nothing => Ok(Value::empty_object()),
        PathField::Path(path) => {
            if scope.input.is_null() && *path.root() == Root::Input && !path.is_root() {
                return Err(StateError::runtime(
                    "Unable to apply Path transformation to null or empty input.",
                ));
            }
            path.evaluate(scope).map_err(|error| StateError::runtime(error.to_string()))
        }
    }
}

/// `Parameters` or `Arguments`: the template's value; without one, the input. `field` is the field's name.
pub fn parameters(
    template: Option<&Template>,
    scope: &EvaluationScope<'_>,
    field: &str,
) -> Result<Value, StateError> {
    template.map_or_else(|| Ok(scope.input.clone()), |template| template.evaluate(scope, field))
}

/// `ResultSelector`: the template's value, where `$` is the result; without one, the result.
pub fn select_result(
    template: Option<&Template>,
    scope: &EvaluationScope<'_>,
    result: &Value,
) -> Result<Value, StateError> {
    template.map_or_else(
        || Ok(result.clone()),
        |template| template.evaluate(&scope.with_input(result), "ResultSelector"),
    )
}

/// `ResultPath`: inserts the result into the state's raw input.
pub fn place_result(field: &ResultPath, raw_input: &Value, result: Value) -> Result<Value, StateError> {
    match field {
        ResultPath::Whole => Ok(result),
        ResultPath::Discard => Ok(raw_input.clone()),
        ResultPath::Path(path) => within_depth(path.set(raw_input, result)?),
    }
}

/// JSONata's `Output`: the template's value; without one, `default`, which is the result or the input. `field` is its
/// path: `Output`, `Choices[0]/Output`, `Catch[0]/Output`.
pub fn output(
    template: Option<&Template>,
    scope: &EvaluationScope<'_>,
    default: &Value,
    field: &str,
) -> Result<Value, StateError> {
    template.map_or_else(|| Ok(default.clone()), |template| template.evaluate(scope, field))
}

/// The maximum number of JSON bytes that one `Assign` may set, as AWS documents it.
pub const ASSIGN_BYTES_MAX: usize = 256 * 1024;
/// The maximum number of JSON bytes of all variables of an execution, as AWS documents it.
pub const VARIABLES_BYTES_MAX: usize = 10 * 1024 * 1024;

/// `Assign`: the variables that it sets, in its order, without assigning them: see
/// [`Variables::assign`](super::Variables::assign). In JSONPath `$` is `scope.input`. `field` is its path, as for
/// [`output`].
///
/// # Errors
/// The template's errors; `States.DataLimitExceeded` beyond [`ASSIGN_BYTES_MAX`] or [`VARIABLES_BYTES_MAX`].
pub fn assign(
    template: Option<&Template>,
    scope: &EvaluationScope<'_>,
    field: &str,
) -> Result<Map, StateError> {
    let Some(template) = template else { return Ok(Map::new()) };
    let assigned = match template.evaluate(scope, field)? {
        Value::Object(map) => std::sync::Arc::unwrap_or_clone(map),
        other => {
            let cause = format!("The value of Assign must be an object, not {}", other.to_text());
            return Err(StateError::runtime(cause));
        }
    };
    let size = assigned.values().map(Value::text_len).sum::<usize>();
    let exceeds = |what: &str, limit: usize| {
        let cause = format!("{what} exceed the maximum size of {limit} bytes.");
        StateError::new(names::DATA_LIMIT_EXCEEDED, cause)
    };
    if size > ASSIGN_BYTES_MAX {
        return Err(exceeds("The variables of one Assign field", ASSIGN_BYTES_MAX));
    }
    if size.saturating_add(scope.variables.text_len()) > VARIABLES_BYTES_MAX {
        return Err(exceeds("The variables of the execution", VARIABLES_BYTES_MAX));
    }
    Ok(assigned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dataflow::{Ambient, Context, Variables};
    use crate::definition::QueryLanguage;
    use crate::path::{Path, ReferencePath};

    fn json(text: &str) -> Value {
        Value::parse(text).expect("valid JSON")
    }

    /// Runs a check with a scope around `input`.
    fn with_scope<T>(input: &str, check: impl FnOnce(&EvaluationScope<'_>) -> T) -> T {
        let (input, context) = (json(input), json(r#"{"State":{"Name":"S"}}"#));
        let variables = Variables::of([("x".into(), json(r#"{"y":[1,2]}"#))].into_iter().collect());
        let ambient = Ambient::new(0, 1);
        check(&EvaluationScope {
            input: &input,
            result: None,
            error_output: None,
            context: Context::Ready(&context),
            variables: &variables,
            ambient: &ambient,
        })
    }

    #[test]
    fn input_and_output_paths() {
        let path = |text: &str| PathField::Path(Path::parse(text).expect("valid"));
        with_scope(r#"{"a":{"b":1}}"#, |scope| {
            let text = |field| effective_input(&field, scope).map(|v| v.to_text()).map_err(|e| e.cause);
            assert_eq!(text(PathField::Whole).as_deref(), Ok(r#"{"a":{"b":1}}"#));
            assert_eq!(text(PathField::Nothing).as_deref(), Ok("{}"));
            assert_eq!(text(path("$.a")).as_deref(), Ok(r#"{"b":1}"#));
            assert_eq!(text(path("$$.State.Name")).as_deref(), Ok(r#""S""#));
            assert_eq!(text(path("$x.y[1]")).as_deref(), Ok("2"));
            assert_eq!(text(path("$.c")), Err("Invalid path '$.c' : No results for path: $['c']".to_owned()));
        });
    }

    #[test]
    fn results_are_placed() {
        let input = json(r#"{"a":1}"#);
        let path = ResultPath::Path(ReferencePath::parse("$.r.s").expect("valid"));
        let placed = |field: &ResultPath| place_result(field, &input, json("2")).map(|v| v.to_text());
        assert_eq!(placed(&ResultPath::Whole).as_deref(), Ok("2"));
        assert_eq!(placed(&ResultPath::Discard).as_deref(), Ok(r#"{"a":1}"#));
        assert_eq!(placed(&path).as_deref(), Ok(r#"{"a":1,"r":{"s":2}}"#));
        let error =
            place_result(&path, &json(r#""input1""#), json("2")).expect_err("a string has no members");
        assert_eq!(error.error, "States.ReferencePathConflict");
        assert_eq!(error.cause, r#"Unable to apply ReferencePath $.r.s to input "input1""#);
    }

    #[test]
    fn assign_and_output_see_the_same_snapshot() {
        let assign_template = Template::compile(
            &json(r#"{"x":"{% $x.y[0] %}","z":"{% $states.input.a %}"}"#),
            QueryLanguage::Jsonata,
        )
        .expect("valid");
        let output_template =
            Template::compile(&json(r#""{% $x.y[1] %}""#), QueryLanguage::Jsonata).expect("valid");
        with_scope(r#"{"a":3}"#, |scope| {
            let assigned = assign(Some(&assign_template), scope, "Assign").expect("assigns");
            assert_eq!(Value::from(assigned.clone()).to_text(), r#"{"x":1,"z":3}"#);
            let out = output(Some(&output_template), scope, scope.input, "Output").expect("outputs");
            assert_eq!(out.to_text(), "2");
            assert_eq!(scope.variables.assign(&assigned).get("x"), Some(&json("1")));
        });
    }

    #[test]
    fn result_selector_sees_the_result() {
        let template = Template::compile(&json(r#"{"n.$":"$.n","v.$":"$x.y"}"#), QueryLanguage::JsonPath)
            .expect("valid");
        with_scope("{}", |scope| {
            let value = select_result(Some(&template), scope, &json(r#"{"n":5}"#)).expect("selects");
            assert_eq!(value.to_text(), r#"{"v":[1,2],"n":5}"#);
            let value = select_result(None, scope, &json("7")).expect("passes");
            assert_eq!(value.to_text(), "7");
        });
    }

    #[test]
    fn limits_of_variables_and_depth_hold() {
        let template = |text: &str| Template::compile(&json(text), QueryLanguage::JsonPath).expect("valid");
        let large = format!(r#"{{"s":"{}"}}"#, "x".repeat(ASSIGN_BYTES_MAX));
        with_scope(&large, |scope| {
            let error = assign(Some(&template(r#"{"v.$":"$.s"}"#)), scope, "Assign").expect_err("too large");
            assert_eq!(error.error, "States.DataLimitExceeded");
        });
        let mut many = Map::new();
        for at in 0..VARIABLES_BYTES_MAX / ASSIGN_BYTES_MAX {
            many.insert(format!("v{at}"), Value::from("x".repeat(ASSIGN_BYTES_MAX - 4)));
        }
        let full = Variables::of(many);
        with_scope(
            r#"{"s":"some more than what is left of the ten megabytes after forty times nearly 256 KiB"}"#,
            |scope| {
                let scope = EvaluationScope { variables: &full, ..*scope };
                assert!(assign(Some(&template(r#"{"v":1}"#)), &scope, "Assign").is_ok());
                let long = format!(r#"{{"v":"{}"}}"#, "x".repeat(1000));
                assert!(assign(Some(&template(&long)), &scope, "Assign").is_err());
            },
        );
        let wrap = template(r#"{"a.$":"$"}"#);
        let mut data = json("1");
        let error = loop {
            match with_scope("{}", |scope| parameters(Some(&wrap), &scope.with_input(&data), "Parameters")) {
                Ok(wrapped) => data = wrapped,
                Err(error) => break error,
            }
        };
        assert_eq!(error.error, "States.DataLimitExceeded");
        assert_eq!(data.depth(), crate::value::DEPTH_MAX);
    }
}
