//! Arbitrary text as paths, templates and values: nothing may panic, and printed values must parse again.

use mayfly_workflows_language::choice;
use mayfly_workflows_language::dataflow::{Ambient, Context, EvaluationScope, Variables};
use mayfly_workflows_language::definition::QueryLanguage;
use mayfly_workflows_language::intrinsic::Intrinsic;
use mayfly_workflows_language::jsonata::Expression;
use mayfly_workflows_language::path::{Path, ReferencePath};
use mayfly_workflows_language::template::Template;
use mayfly_workflows_language::value::{Map, Value};
use proptest::prelude::*;

fn values() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec(("[a-d]{1,2}", inner), 0..20).prop_map(|entries| {
                Value::from(entries.into_iter().map(|(key, value)| (key.into(), value)).collect::<Map>())
            }),
        ]
    })
}

/// Paths composed of their parts.
fn paths() -> impl Strategy<Value = String> {
    let step = prop::sample::select(vec![
        ".a",
        ".b",
        "['c']",
        "[0]",
        "[-1]",
        "[*]",
        ".*",
        "..a",
        "..*",
        "[0:2]",
        "[1:]",
        "[:-1]",
        "[0,1]",
        "['a','b']",
        "[?(@.a)]",
        "[?(@.a == 1)]",
        "[?(@ > 'x')]",
        "[?(!(@.b < $.a) || @.c in [1,'x'])]",
        ".length()",
        "..[0]",
    ]);
    prop::collection::vec(step, 0..6).prop_map(|steps| format!("${}", steps.concat()))
}

fn with_scope<T>(input: &Value, run: impl FnOnce(&EvaluationScope<'_>) -> T) -> T {
    let (variables, ambient, context) = (Variables::new(), Ambient::new(0, 1), Value::empty_object());
    run(&EvaluationScope {
        input,
        result: None,
        error_output: None,
        context: Context::Ready(&context),
        variables: &variables,
        ambient: &ambient,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn printed_values_parse_to_the_same_value(value in values()) {
        let text = value.to_text();
        prop_assert_eq!(text.len(), value.text_len());
        let again = Value::parse(&text).expect("our own text");
        prop_assert_eq!(again.to_text(), text);
        prop_assert_eq!(again, value);
    }

    #[test]
    fn any_text_is_read_or_refused(text in ".{0,60}", json in r#"[\[\]{},:"\\0-9eE+.a-f -]{0,40}"#) {
        for text in [text, json] {
            if let Err(error) = Value::parse(&text) {
                prop_assert!(error.describe(&text).contains("[Source: (String)"));
            }
        }
    }

    #[test]
    fn any_path_is_refused_or_evaluated(text in r"\$[$.\[\]()?@'a-c0-9*:,<=! &|-]{0,30}", value in values()) {
        if let Ok(path) = Path::parse(&text) {
            let found = path.evaluate_on(&value);
            prop_assert!(path.is_definite() || found.is_ok());
        }
        if let Ok(path) = ReferencePath::parse(&text)
            && let Ok(changed) = path.set(&value, Value::from(7_i64))
        {
            prop_assert_eq!(path.as_path().evaluate_on(&changed).ok(), Some(Value::from(7_i64)));
        }
    }

    #[test]
    fn indefinite_paths_give_arrays(text in paths(), value in values()) {
        let path = Path::parse(&text).unwrap_or_else(|problem| panic!("{text}: {problem}"));
        if let (Ok(found), false) = (path.evaluate_on(&value), path.is_definite()) {
            prop_assert!(found.is_array());
        }
    }

    #[test]
    fn any_call_is_refused_or_evaluated(name in "Format|Array|MathAdd|StringSplit|ArrayRange|Hash|JsonMerge|UUID|Nope",
                                        arguments in r"[$.'a-c{}\\0-9, ()-]{0,20}", value in values()) {
        if let Ok(call) = Intrinsic::parse(&format!("States.{name}({arguments})")) {
            with_scope(&value, |scope| {
                let _ = call.evaluate(scope);
            });
        }
    }

    #[test]
    fn any_expression_is_refused_or_evaluated(text in r"[$a-d.\[\](){}'0-9+*/<=&?:~>^%@# ,-]{0,24}", value in values()) {
        if let Ok(expression) = Expression::compile(&text) {
            with_scope(&value, |scope| {
                let _ = expression.evaluate(scope, "Output");
            });
        }
    }

    #[test]
    fn any_json_is_a_template_or_has_problems(value in values(), input in values()) {
        for language in [QueryLanguage::JsonPath, QueryLanguage::Jsonata] {
            if let Ok(template) = Template::compile(&value, language) {
                let made = with_scope(&input, |scope| template.evaluate(scope, "Output"));
                // It contains no path or expression, so it is a literal.
                prop_assert_eq!(made.ok(), Some(value.clone()));
            }
        }
        let _ = choice::ChoiceTest::compile(&value);
    }
}
