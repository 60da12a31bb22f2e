use std::time::{Duration, Instant};

use super::*;
use crate::dataflow::{Ambient, Context, Variables, Verdict};

fn json(text: &str) -> Value {
    Value::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

const INPUT: &str =
    r#"{"n":3,"f":1.5,"s":"text","l":[1,2,3],"o":{"a":{"b":true}},"e":[],"one":[5],"z":null}"#;

fn run(source: &str) -> Result<String, String> {
    let expression = Expression::compile(source).map_err(|problem| format!("compile: {problem}"))?;
    evaluate(&expression, &Ambient::new(1_510_067_557_121, 7))
}

fn evaluate(expression: &Expression, ambient: &Ambient) -> Result<String, String> {
    let (input, context) = (json(INPUT), json(r#"{"State":{"Name":"S"},"Execution":{"Id":"arn"}}"#));
    let variables = Variables::of(
        [("v".into(), json(r#"{"k":[{"x":1},{"x":2}]}"#)), ("count".into(), Value::from(4_i64))]
            .into_iter()
            .collect(),
    );
    let (result, error_output) = (json(r#"{"r":9}"#), json(r#"{"Error":"E","Cause":"C"}"#));
    let scope = EvaluationScope {
        input: &input,
        result: Some(&result),
        error_output: Some(&error_output),
        context: Context::Ready(&context),
        variables: &variables,
        ambient,
    };
    expression.evaluate(&scope, "Output").map(|value| value.to_text()).map_err(|error| error.cause)
}

fn gives(cases: &[(&str, &str)]) {
    for (source, expected) in cases {
        assert_eq!(run(source).as_deref(), Ok(*expected), "{source}");
    }
}

#[test]
fn states_variables_and_operators() {
    gives(&[
        ("$states.input.n", "3"),
        ("$states.input.f", "1.5"),
        ("$states.input.one", "[5]"),
        ("$states.input.o.a.b", "true"),
        ("$states.input.z", "null"),
        ("$states.result.r + 1", "10"),
        ("$states.errorOutput.Error", r#""E""#),
        ("$states.context.State.Name", r#""S""#),
        ("$v.k.x", "[1,2]"),
        ("$v.k[1].x", "2"),
        ("$states.input.n > 2 and $states.input.s = 'text'", "true"),
        ("$states.input.n = 3 ? 'yes' : 'no'", r#""yes""#),
        ("{'a': $states.input.n, 'b': $states.input.no, 'c': {'d': $count}}", r#"{"a":3,"c":{"d":4}}"#),
        ("$states.input.s & '-' & $states.input.n", r#""text-3""#),
        ("$sum($states.input.l) / 2", "3"),
        ("[1..4]", "[1,2,3,4]"),
        ("$variable := 1", "1"),
        ("$map($states.input.l, function($i) { $i * 2 })", "[2,4,6]"),
        ("$merge([$states.input.o, {'c': 1}])", r#"{"a":{"b":true},"c":1}"#),
        ("$contains('hello$world', /^hello\\ /)", "false"),
        ("10 / 4", "2.5"),
        ("6 / 3", "2"),
    ]);
}

#[test]
fn aws_functions_clock_and_randomness() {
    gives(&[
        ("$partition([1,2,3,4,5], 2)", "[[1,2],[3,4],[5]]"),
        ("$range(0, 10, 3)", "[0,3,6,9]"),
        ("$range(3, 1, -1)", "[3,2,1]"),
        ("$range(3, 1, 1)", "[]"),
        ("$hash('input data', 'SHA-1')", r#""aaff4a450a104cd177d28d18d74485e8cae074b7""#),
        (r#"$parse('{"a":[1,2]}').a[1]"#, "2"),
        ("$random(42)", "0.7275636800328681"),
        ("$random(42) = $random(42)", "true"),
        // A slice by a range of indexes.
        ("[10, 20, 30, 40][[1..2]]", "[20,30]"),
        ("[10, 20, 30, 40][[-2..-1]]", "[30,40]"),
        ("[10, 20, 30, 40][[2..9]]", "[30,40]"),
        ("$random() != $random()", "true"),
        ("$length($uuid())", "36"),
        ("$uuid() != $uuid()", "true"),
        ("$millis()", "1510067557121"),
        ("$now()", r#""2017-11-07T15:12:37.121Z""#),
        ("$now('[Y0001]/[M01]')", r#""2017/11""#),
        ("$count($shuffle([1..10]))", "10"),
        ("$sum($shuffle([1..10]))", "55"),
        ("$string($states.input.o)", r#""{\"a\":{\"b\":true}}""#),
        ("$join(['a','b'], '-')", r#""a-b""#),
        ("'x' ~> $pad(3, '-')", r#""x--""#),
        ("$pad('x', -3)", r#""  x""#),
        ("$map(['a','b'], $uppercase)", r#"["A","B"]"#),
        ("$reduce([['a'],['b']], $append)", r#"["a","b"]"#),
        ("$replace('aXbX', 'X', '-')", r#""a-b-""#),
        ("$replace('a1b2', /[0-9]/, function($m) { '<' & $m.match & '>' })", r#""a<1>b<2>""#),
        ("$replace('John Smith', /(\\w+)\\s(\\w+)/, '$2, $1')", r#""Smith, John""#),
    ]);
}

#[test]
fn eval_is_refused_before_it_runs() {
    for source in ["$eval('1+1')", "($e := $eval; $e('1'))"] {
        let problem = Expression::compile(source).expect_err(source);
        assert!(problem.message.contains("'$eval' is not supported"), "{problem:?}");
    }
}

#[test]
fn failures_are_worded_as_aws_words_them() {
    assert_eq!(
        run("$states.input.no"),
        Err("The JSONata expression '$states.input.no' specified for the field 'Output' returned nothing (undefined)."
            .to_owned())
    );
    for source in ["$nope(1)", "$states.input.s('x')"] {
        let failure = run(&format!("({source})")).expect_err(source);
        let wanted = format!(
            "The JSONata expression '({source})' specified for the field 'Output' threw an error during evaluation. T100"
        );
        assert!(failure.starts_with(&wanted), "{failure}");
    }
    for (source, code) in
        [("1 + 'a'", "T2002"), ("'a' + 1", "T2001"), ("1 < 'a'", "T2009"), ("$number('x')", "D3030")]
    {
        let failure = run(source).expect_err(source);
        assert!(failure.contains(&format!("threw an error during evaluation. {code}: ")), "{failure}");
    }
    for (source, values) in [
        ("'a' > 1", "\"a\" and 1 either side of operator \">\""),
        ("1 < 2 and (2.5 <= $states.input.s)", "2.5 and \"text\" either side of operator \"<=\""),
    ] {
        let failure = run(source).expect_err(source);
        let wanted = format!("T2009: The values {values} must be of the same data type");
        assert!(failure.ends_with(&wanted), "{failure}");
    }
    assert!(run("()").expect_err("()").ends_with("returned nothing (undefined)."));
    // Recalled from AWS's console; the wording is not verified.
    for source in ["function($x) { $x }", "$sum", "/x/"] {
        assert!(run(source).expect_err(source).ends_with("returned an unsupported result type."), "{source}");
    }
}

#[test]
fn delimiters() {
    assert_eq!(delimited("plain {% no %} text"), Delimited::No);
    assert_eq!(delimited("{% $x %}"), Delimited::Expression("$x"));
    assert_eq!(delimited("{%%}"), Delimited::Expression(""));
    for broken in ["{% $x", "$x %}", " {% $x %}", "{% $x %} ", "{%}"] {
        assert!(!matches!(delimited(broken), Delimited::Expression(_)), "{broken}");
    }
    assert!(matches!(delimited("{% $x"), Delimited::Invalid(_)));
}

/// Each would exhaust memory or run without end; each must fail in time.
#[test]
fn runaway_expressions_are_stopped() {
    let sources = [
        ("padding", "$pad('a', 2000000000)"),
        ("padding by value", "$f := $pad; $f('a', 2000000000)"),
        ("doubling", "$reduce([1..60], function($a) { $a & $a }, 'xxxxxxxxxx')"),
        ("doubling a list", "$reduce([1..60], function($a) { $append($a, $a) }, [1])"),
        ("doubling unseen, then printed", "$string($reduce([1..60], function($a) { [$a, $a] }, ['x']))"),
        (
            "doubling unseen, then handed on",
            "$reduce([1..60], function($a) { {'a': $a, 'b': $a} }, {'x': 1})",
        ),
        ("a huge range", "[1..100000000000]"),
        ("ranges of ranges", "[1..1000000].([1..1000000])"),
        ("range of the host", "$range(1, 1000000000000, 1)"),
        ("joining", "($s := $pad('', 1000000, 'x'); $join([1..1000000].($s), $s))"),
        ("joining by value", "($s := $pad('', 1000000, 'x'); $map([1..100000].[$s, $s], $join))"),
        ("replacing", "($s := $pad('', 1000000, 'x'); $replace($s, 'x', $s))"),
        ("replacing by a pattern", "($s := $pad('', 1000000, 'x'); $replace($s, /x/, $s))"),
        ("replacing by a function", "($s := $pad('', 1000000, 'x'); $replace($s, /x/, function() { $s }))"),
        (
            "replacing by a function elsewhere",
            "($s := $pad('', 1000000, 'x'); $f := function() { $s }; $replace($s, /x/, $f))",
        ),
        ("keeping capitals", "($s := $pad('', 1000000, 'x'); [1..1000000].$uppercase($s))"),
        ("keeping capitals by value", "($s := $pad('', 1000000, 'x'); $map([1..1000000].[$s], $uppercase))"),
        ("a wide picture", "$fromMillis(0, '[Y,2000000000-2000000000]')"),
        ("looping for ever", "($f := function($x) { $f($x + 1) }; $f(1))"),
        ("recursing for ever", "($f := function($x) { 1 + $f($x + 1) }; $f(1))"),
        (
            "comparing shared parts",
            "($d := function() { $reduce([1..60], function($a) { [$a, $a] }, ['x']) }; $d() = $d())",
        ),
    ];
    for (what, source) in sources {
        let begin = Instant::now();
        let outcome = run(&format!("({source})"));
        assert!(outcome.is_err(), "{what}: {:?}", outcome.map(|text| text.len()));
        assert!(begin.elapsed() < Duration::from_millis(MILLIS_MAX + 3_000), "{what}: {:?}", begin.elapsed());
        let peak = peak_kib();
        assert!(peak < 1024 * 1024, "{what}: {peak} KiB at the most");
    }
    eprintln!("runaway expressions: {} KiB at the most", peak_kib());
}

/// The process's peak resident set size, in KiB.
fn peak_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[test]
fn long_and_deep_expressions_are_refused() {
    assert!(Expression::compile(&"1+".repeat(EXPRESSION_CHARS_MAX)).is_err());
    assert!(Expression::compile(&("1+".repeat(5_000) + "1")).is_err());
    assert!(Expression::compile(&("(".repeat(5_000) + "1" + &")".repeat(5_000))).is_err());
    assert!(Expression::compile(&("[".repeat(300) + "1" + &"]".repeat(300))).is_ok());
}

#[test]
fn there_is_no_document_at_the_top() {
    for source in ["$", "$$", "$.a", "$string($)", "{'a': $}", "$states.input.l.($$)"] {
        assert!(Expression::compile(source).is_err(), "{source}");
    }
    gives(&[
        ("$states.input.l.($ + 1)", "[2,3,4]"),
        ("$states.input.l[$ > 1]", "[2,3]"),
        ("$states.input.l^(>$)", "[3,2,1]"),
        ("$states.input.s.$uppercase()", r#""TEXT""#),
    ]);
}

#[test]
fn a_replay_fails_exactly_the_evaluations_that_timed_out() {
    let expression = Expression::compile("$sum([1..1000].($ * 2))").unwrap_or_else(|error| panic!("{error}"));
    let evaluate = |ambient: &Ambient| evaluate(&expression, ambient);
    let live = Ambient::new(0, 1);
    let told = evaluate(&live);
    assert_eq!(told.as_deref(), Ok("1001000"));
    assert_eq!(live.into_verdicts(), []);
    let ended = Verdict { evaluation: 1, error: "too long".to_owned() };
    let again = Ambient::replay(0, 1, vec![ended]);
    assert_eq!(evaluate(&again), told);
    assert!(evaluate(&again).is_err_and(|cause| cause.contains("too long")));
    assert_eq!(evaluate(&again), told);
}
