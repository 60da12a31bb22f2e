use super::*;
use crate::dataflow::{Ambient, Context, Variables};

fn json(text: &str) -> Value {
    Value::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn run(template: &str, language: QueryLanguage, input: &str) -> Result<String, StateError> {
    let template = Template::compile(&json(template), language)
        .unwrap_or_else(|problems| panic!("{template}: {problems:?}"));
    let (input, context) = (json(input), json(r#"{"State":{"Name":"S"}}"#));
    let variables = Variables::of([("v".into(), json(r#"{"k":[1,2]}"#))].into_iter().collect());
    let ambient = Ambient::new(0, 1);
    let scope = EvaluationScope {
        input: &input,
        result: None,
        error_output: None,
        context: Context::Ready(&context),
        variables: &variables,
        ambient: &ambient,
    };
    template.evaluate(&scope, "Output").map(|value| value.to_text())
}

#[test]
fn payload_templates() {
    for (template, expected) in [
        (r#"{"a":1,"b":"$.x","c":{"d":[null]}}"#, r#"{"a":1,"b":"$.x","c":{"d":[null]}}"#),
        (
            r#"{"a.$":"$.x","b":{"c.$":"$$.State.Name"},"l":[{"d.$":"$v.k[1]"},2]}"#,
            r#"{"b":{"c":"S"},"l":[{"d":2},2],"a":7}"#,
        ),
        (r#"{"s.$":"States.Format('{}!', $.x)","all.$":"$"}"#, r#"{"all":{"x":7},"s":"7!"}"#),
        (r#"{"none.$":"$.none[*].y"}"#, r#"{"none":[]}"#),
    ] {
        assert_eq!(
            run(template, QueryLanguage::JsonPath, r#"{"x":7}"#).as_deref(),
            Ok(expected),
            "{template}"
        );
    }
    let error =
        run(r#"{"in":{"value.$":"$.no"}}"#, QueryLanguage::JsonPath, r#"{"x":7}"#).expect_err("missing");
    assert_eq!(
        error.cause,
        r#"The JSONPath '$.no' specified for the field 'value.$' could not be found in the input '{"x":7}'"#
    );
    let error = run(r#"{"v.$":"$$.State.No"}"#, QueryLanguage::JsonPath, r#"{"x":7}"#).expect_err("missing");
    assert_eq!(
        error.cause,
        r#"The JSONPath '$$.State.No' specified for the field 'v.$' could not be found in the input '{"State":{"Name":"S"}}'"#
    );
    let error = run(r#"{"v.$":"$.no"}"#, QueryLanguage::JsonPath, "null").expect_err("null input");
    assert_eq!(error.cause, "Unable to apply Path transformation to null or empty input.");
}

#[test]
fn jsonata_templates() {
    for (template, expected) in [
        (
            r#"{"a":"{% $states.input.x + 1 %}","b":"$.x","c":["{% $v.k %}",3]}"#,
            r#"{"a":8,"b":"$.x","c":[[1,2],3]}"#,
        ),
        (r#""{% $states.input %}""#, r#"{"x":7}"#),
        (r#""{% $states.context.State.Name & '!' %}""#, r#""S!""#),
    ] {
        assert_eq!(
            run(template, QueryLanguage::Jsonata, r#"{"x":7}"#).as_deref(),
            Ok(expected),
            "{template}"
        );
    }
    let error = run(r#"{"l":[{"m":"{% $states.input.no %}"}]}"#, QueryLanguage::Jsonata, "{}")
        .expect_err("undefined");
    assert_eq!(error.error, "States.QueryEvaluationError");
    assert_eq!(error.location.as_deref(), Some("Output/l[0]/m"));
    assert_eq!(
        error.cause,
        "The JSONata expression '$states.input.no' specified for the field 'Output/l[0]/m' returned nothing (undefined)."
    );
}

#[test]
fn all_problems_are_found_with_their_places() {
    let places = |template: &str, language| -> Vec<String> {
        let problems = Template::compile(&json(template), language).expect_err("refused");
        problems.into_iter().map(|problem| problem.location).collect()
    };
    assert_eq!(
        places(r#"{"a.$":1,"b":{"c.$":"x"},"d":[1,{"e.$":"$.["}]}"#, QueryLanguage::JsonPath),
        ["", "/b", "/d[1]"]
    );
    assert_eq!(
        places(r#"{"a":"{% 1 + %}","b":["{% x"," {% 1 %}"]}"#, QueryLanguage::Jsonata),
        ["/a", "/b[0]", "/b[1]"]
    );
}

#[test]
fn variables_of_a_template_are_listed() {
    let names = |template: &str, language| {
        let mut names = Vec::new();
        let template = Template::compile(&json(template), language).expect("valid");
        template.variables(&mut |name| names.push(name.to_owned()));
        names
    };
    assert_eq!(
        names(
            r#"{"a.$":"$v.k","b.$":"States.MathAdd($x, States.MathAdd($y, 1))","c.$":"$.z"}"#,
            QueryLanguage::JsonPath
        ),
        ["v", "x", "y"]
    );
    assert_eq!(
        names(
            r#"["{% ($a := 1; $a + $b + $states.input.c) %}","{% $map($l, function($i) { $i + $k }) %}"]"#,
            QueryLanguage::Jsonata
        ),
        ["b", "k", "l"]
    );
}
