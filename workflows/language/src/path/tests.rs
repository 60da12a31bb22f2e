use super::*;

fn json(text: &str) -> Value {
    Value::parse(text).expect("valid JSON")
}

fn read(path: &str, root: &str) -> Result<String, String> {
    let path = Path::parse(path).unwrap_or_else(|problem| panic!("{path}: {problem}"));
    path.evaluate_on(&json(root)).map(|value| value.to_text()).map_err(|error| error.to_string())
}

const STORE: &str = r#"{"store":{"book":[{"title":"A","price":8.95,"tags":["x"]},{"title":"B","price":12.99},
    {"title":"C","price":8.99,"isbn":"0-553"}],"bicycle":{"color":"red","price":19.95}},"limit":10,"a-b":1,"n":null}"#;

#[test]
fn values_of_paths() {
    for (path, expected) in [
        ("$.limit", "10"),
        ("$.a-b", "1"),
        ("$['a-b']", "1"),
        ("$[\"a-b\"]", "1"),
        ("$.n", "null"),
        ("$.store.book[0].title", r#""A""#),
        ("$.store.book[-1].title", r#""C""#),
        ("$.store.book[*].title", r#"["A","B","C"]"#),
        ("$.store.book[0,2].title", r#"["A","C"]"#),
        ("$.store.book[1:].title", r#"["B","C"]"#),
        ("$.store.book[:1].title", r#"["A"]"#),
        ("$.store.book[0:2].title", r#"["A","B"]"#),
        ("$.store.book[-2:].title", r#"["B","C"]"#),
        ("$.store.book[1:99].title", r#"["B","C"]"#),
        ("$.store.book[:-1].title", r#"["A","B"]"#),
        ("$.store.book[:-7].title", "[]"),
        ("$.store.book[-7:].title", r#"["A","B","C"]"#),
        ("$.store.book[-3:-1].title", r#"["A","B"]"#),
        ("$.store.book[1:-1].title", "[]"),
        ("$.store.book[-1:1].title", r#"["C","A"]"#),
        ("$.store.book[-9223372036854775808:1].title", r#"["A","B","C","A"]"#),
        ("$.store.book[0:2:2].title", r#"["A","B"]"#),
        ("$.store.book[?(@.price < 10)].title", r#"["A","C"]"#),
        ("$.store.book[?(@.price < $.limit)].title", r#"["A","C"]"#),
        ("$.store.book[?(@.price<10&&@.isbn)].title", r#"["C"]"#),
        ("$.store.book[?(!@.isbn)].title", r#"["A","B"]"#),
        ("$.store.book[?(@.isbn || @.title == 'B')].title", r#"["B","C"]"#),
        ("$.store.book.[?(@.title == 'B')].price", "[12.99]"),
        ("$.store.book[?(@.title =~ /[ab]/i)].title", r#"["A","B"]"#),
        ("$.store.book[?(@.title in ['A','C'])].title", r#"["A","C"]"#),
        ("$.store.book[?(@.title nin ['A','C'])].title", r#"["B"]"#),
        ("$.store.book[?(@.tags contains 'x')].title", r#"["A"]"#),
        ("$.store.book[?(@.price == '12.99')].title", r#"["B"]"#),
        ("$.store.book[?(@.isbn != 'x')].title", r#"["A","B","C"]"#),
        ("$.store.book[?(@.title == B)].price", "[12.99]"),
        ("$.store.book[(@.length-1)].title", r#""C""#),
        ("$..price", "[8.95,12.99,8.99,19.95]"),
        ("$..book[0].title", r#"["A"]"#),
        ("$.store.bicycle.*", r#"["red",19.95]"#),
        ("$.store.bicycle['color','price']", r#"{"color":"red","price":19.95}"#),
        ("$.store.book.length()", "3"),
        ("$.store.book[*].length()", "3"),
        ("$.store.none[*]", "[]"),
        ("$.none.items[1:5].itemValue", "[]"),
        ("$..none", "[]"),
        ("$.store.book[?(@.price > 100)]", "[]"),
    ] {
        assert_eq!(read(path, STORE).as_deref(), Ok(expected), "{path}");
    }
}

#[test]
fn missing_paths_have_the_messages_of_jayway() {
    for (path, expected) in [
        ("$.NoSuch", "Invalid path '$.NoSuch' : No results for path: $['NoSuch']"),
        ("$.no.such", "Invalid path '$.no.such' : Missing property in path $['no']"),
        ("$.store.no", "Invalid path '$.store.no' : No results for path: $['store']['no']"),
        (
            "$.store.book[7].title",
            "Invalid path '$.store.book[7].title' : Expected to find an object with property ['title'] in path $['store']['book'][7] but found 'null'. This is not a json object according to the JsonProvider: 'com.jayway.jsonpath.spi.json.JacksonJsonNodeJsonProvider'.",
        ),
        ("$.store.book[7][0]", "Invalid path '$.store.book[7][0]' : The path $['store']['book'][7] is null"),
        (
            "$.limit[0]",
            "Invalid path '$.limit[0]' : Filter: [0] can only be applied to arrays. Current context is: 10",
        ),
        (
            "$.store.book.sum()",
            "Invalid path '$.store.book.sum()' : No results for path: $['store']['book'].sum()",
        ),
        (
            "$.n[0]",
            "Invalid path '$.n[0]' : Filter: [0] can only be applied to arrays. Current context is: null",
        ),
        (
            "$.limit.x",
            "Invalid path '$.limit.x' : Expected to find an object with property ['x'] in path $['limit'] but found 'com.fasterxml.jackson.databind.node.IntNode'. This is not a json object according to the JsonProvider: 'com.jayway.jsonpath.spi.json.JacksonJsonNodeJsonProvider'.",
        ),
    ] {
        assert_eq!(read(path, STORE), Err(expected.to_owned()), "{path}");
    }
}

/// Measured on AWS (floci-io/floci#3167): an index past the end reads as null.
#[test]
fn an_item_past_the_end_is_null_and_not_present() {
    assert_eq!(read("$.store.book[7]", STORE).as_deref(), Ok("null"));
    assert_eq!(read("$.store.book[-7]", STORE).as_deref(), Ok("null"));
}

#[test]
fn bad_paths_are_refused() {
    for path in [
        "",
        "x",
        "a.b",
        "$.",
        "$..",
        "$[",
        "$['a",
        "$[a]",
        "$.a[?(@.x]",
        "$.a[?@.x]",
        "$.a b",
        "$.a[",
        "$.f(1)",
        "$$$",
        "$.a[1",
    ] {
        assert!(Path::parse(path).is_err(), "{path}");
    }
    assert!(Path::parse(&format!("$.{}", "a".repeat(PATH_CHARS_MAX))).is_err());
    assert!(Path::parse(&format!("$[?({}@.x", "(".repeat(4000))).is_err());
}

#[test]
fn roots_of_paths_are_distinguished() {
    let root = |text: &str| Path::parse(text).expect("valid").root().clone();
    assert_eq!(root("$.a"), Root::Input);
    assert_eq!(root("$$.Execution.Id"), Root::Context);
    assert_eq!(root("$name[0].x"), Root::Variable("name".into()));
    assert!(Path::parse("$.a['b'][0]").expect("valid").is_definite());
    for indefinite in ["$.*", "$..a", "$.a[*]", "$.a[0,1]", "$.a[0:1]", "$.a[?(@.b)]"] {
        assert!(!Path::parse(indefinite).expect("valid").is_definite(), "{indefinite}");
    }
}

#[test]
fn result_paths_create_what_is_missing() {
    let set = |path: &str, target: &str| {
        let path = ReferencePath::parse(path).unwrap_or_else(|problem| panic!("{path}: {problem}"));
        path.set(&json(target), json("7")).map(|value| value.to_text()).map_err(|error| error.cause)
    };
    assert_eq!(set("$", r#"{"a":1}"#).as_deref(), Ok("7"));
    assert_eq!(set("$.b", r#"{"a":1}"#).as_deref(), Ok(r#"{"a":1,"b":7}"#));
    assert_eq!(set("$.a", r#"{"a":1,"b":2}"#).as_deref(), Ok(r#"{"a":7,"b":2}"#));
    assert_eq!(set("$.b.c['d']", r#"{"a":1}"#).as_deref(), Ok(r#"{"a":1,"b":{"c":{"d":7}}}"#));
    assert_eq!(set("$.a[1]", r#"{"a":[1,2]}"#).as_deref(), Ok(r#"{"a":[1,7]}"#));
    assert_eq!(
        set("$.a[2]", r#"{"a":[1,2]}"#),
        Err(r#"Unable to apply ReferencePath $.a[2] to input {"a":[1,2]}"#.to_owned())
    );
    assert!(set("$.a.b", r#"{"a":"text"}"#).is_err());
    for text in ["$.*", "$.a[?(@.b)]", "$..a", "$.a[0:1]", "$.a[-1]"] {
        assert!(ReferencePath::parse(text).is_err(), "{text}");
    }
}
