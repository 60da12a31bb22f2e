use super::*;

/// A component in text form, as bytes.
fn component(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap()
}

#[test]
fn refusals() {
    let cases: &[(&[u8], &str)] = &[
        (b"", "not a wasm file: it starts with nothing: it is empty"),
        (b"#!/bin/sh\necho", "not a wasm file: it starts with \"#!/bin/sh\\necho\""),
        (b"\x7fELF\x02\x01", "not a wasm file: it starts with 7f 45 4c 46 02 01"),
        (b"\0asm\x0d\0\x01\0\xff", "not a valid component: "),
    ];
    for (content, expected) in cases {
        let refused = inspect(content).unwrap_err().to_string();
        assert!(refused.starts_with(expected), "{refused}");
    }
    let module = inspect(&component("(module)")).unwrap_err();
    assert_eq!(module, ComponentRefused::CoreModule);
    assert!(module.to_string().contains("wasm-tools component new"));
}

#[test]
fn imports_that_are_not_here_are_named() {
    let refused = inspect(&component(
        r#"(component
            (import "wasi:keyvalue/store@0.2.0-draft" (instance))
            (import "wasi:cli/stdout@0.9.0" (instance))
            (import "wasi:config/store@0.2.0" (instance))
            (import "wasi:cli/environment@0.2.3" (instance)))"#,
    ));
    assert_eq!(
        refused.unwrap_err().to_string(),
        "it imports what this host does not have: wasi:keyvalue/store@0.2.0-draft; \
         wasi:cli/stdout@0.9.0 (this host has wasi:cli/stdout in version 0.2.12 and 0.3.0); \
         wasi:config/store@0.2.0 (this host has wasi:config/store in version 0.2.0-rc.1 and 0.2.0-draft-2024-09-27)"
    );
}

#[test]
fn what_can_never_run_is_refused() {
    for (module, why) in
        [("(memory 1 1 shared)", "shared memory"), ("(table 200001 funcref)", "a table of 200001 elements")]
    {
        let text = format!("(component (core module $m {module}))");
        let refused = inspect(&component(&text)).unwrap_err();
        assert!(matches!(refused, ComponentRefused::CannotRun(_)), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}");
    }
    let text = "(component (core module $m (table 200000 funcref) (memory 1)))";
    assert!(matches!(inspect(&component(text)), Err(ComponentRefused::WrongWorld(_))));
}

#[test]
fn the_wrong_world_is_told() {
    let refused = inspect(&component("(component)")).unwrap_err();
    assert_eq!(refused, ComponentRefused::WrongWorld(vec![]));
    let text = r#"(component (component $c) (instance $i (instantiate $c))
                    (export "example:calculator/add@1.0.0" (instance $i)))"#;
    let refused = inspect(&component(text)).unwrap_err();
    assert!(refused.to_string().ends_with("it exports example:calculator/add@1.0.0"), "{refused}");
}

#[test]
fn worlds_are_found() {
    for (export, world) in [
        ("wasi:http/incoming-handler@0.2.0", ComponentWorld::HttpWasi0_2),
        ("wasi:http/incoming-handler@0.2.12", ComponentWorld::HttpWasi0_2),
        ("wasi:http/handler@0.3.0", ComponentWorld::HttpWasi0_3),
        ("wasi:cli/run@0.2.6", ComponentWorld::CommandWasi0_2),
        ("wasi:cli/run@0.3.0", ComponentWorld::CommandWasi0_3),
    ] {
        let text = format!(
            r#"(component (component $c) (instance $i (instantiate $c)) (export "{export}" (instance $i)))"#
        );
        let report = inspect(&component(&text)).unwrap();
        assert_eq!(report.worlds, [world], "{export}");
        assert_eq!(report.exports, [export]);
    }
}
