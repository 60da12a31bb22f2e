use super::*;

const V2: &str = r#"
spin_manifest_version = 2
[application]
name = "shop"
version = "1.0.0"
[application.trigger.http]
base = "/v1"
[variables]
who = { default = "Ada" }
token = { required = true, secret = true }
[[trigger.http]]
route = "/cart/..."
component = "cart"
[[trigger.http]]
route = "/"
component = "cart"
[[trigger.http]]
route = { private = true }
component = "stock"
[component.cart]
source = "target/cart.wasm"
allowed_outbound_hosts = ["https://api.example.com"]
files = ["assets/**/*.html", { source = "public", destination = "/" }]
exclude_files = ["assets/secret.html"]
environment = { MODE = "fast" }
[component.cart.variables]
greeting = "hello, {{ who }}"
[component.cart.build]
command = "make"
workdir = "cart"
watch = ["src/*"]
[component.stock]
source = { url = "https://example.com/s.wasm", digest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855" }
[component.library]
source = "l.wasm"
"#;

#[test]
fn version_2_is_read() {
    let app = parse(V2, "spin.toml").unwrap();
    assert_eq!((app.name.as_str(), app.unused.as_slice()), ("shop", &["library".to_owned()][..]));
    assert!(app.variables["token"].secret && app.variables["who"].default.as_deref() == Some("Ada"));
    let [cart, stock] = app.components.as_slice() else { panic!("{:?}", app.components) };
    assert_eq!(cart.source, ComponentSource::File("target/cart.wasm".into()));
    assert_eq!(cart.routes, [TriggerRoute::Wildcard("/v1/cart".into()), TriggerRoute::Exact("/v1".into())]);
    assert_eq!(cart.files.len(), 2);
    assert_eq!(cart.variables["greeting"], "hello, {{ who }}");
    let build =
        BuildCommand { command: "make".into(), workdir: Some("cart".into()), watch: vec!["src/*".into()] };
    assert_eq!(cart.build, Some(build));
    assert!(stock.is_private && stock.routes.is_empty() && !cart.is_private);
    assert!(matches!(&stock.source, ComponentSource::Url { url, .. } if url == "https://example.com/s.wasm"));
}

#[test]
fn version_1_is_read() {
    let app = parse(
        r#"
        spin_manifest_version = "1"
        name = "old"
        version = "0.1.0"
        trigger = { type = "http", base = "/" }
        [variables]
        who = { default = "Ada" }
        [[component]]
        id = "hello"
        source = "hello.wasm"
        allowed_http_hosts = ["example.com", "https://a.example:444"]
        [component.trigger]
        route = "/hello"
        [component.config]
        greeting = "{{ who }}"
        "#,
        "spin.toml",
    )
    .unwrap();
    let [hello] = app.components.as_slice() else { panic!() };
    assert_eq!(hello.routes, [TriggerRoute::Exact("/hello".into())]);
    assert_eq!(hello.outbound_hosts, ["*://example.com", "https://a.example:444"]);
    assert_eq!(hello.variables["greeting"], "{{ who }}");
}

#[test]
fn what_is_missing_is_named_all_at_once() {
    let text = r#"
        spin_manifest_version = 2
        [application]
        name = "x"
        [[trigger.redis]]
        channel = "c"
        component = "a"
        [[trigger.cron]]
        component = "a"
        [[trigger.http]]
        route = "/users/:id"
        component = "a"
        [[trigger.http]]
        route = "/w"
        component = "a"
        executor = { type = "wagi" }
        [[trigger.http]]
        route = "/inline"
        component = { source = "x.wasm" }
        [component.a]
        source = { registry = "r.example", package = "a:b", version = "1.0.0" }
        key_value_stores = ["default"]
        sqlite_databases = ["default"]
        ai_models = ["llama2-chat"]
        novelty = 1
        [component.a.dependencies]
        "a:b/c" = "x.wasm"
    "#;
    let error = parse(text, "spin.toml").unwrap_err();
    let shown = error.to_string();
    for expected in [
        "trigger.redis:",
        "trigger.cron: triggers of this kind: a Function has spec.triggers",
        "the route of \"a\": named wildcards",
        "WAGI",
        "trigger.http.component",
        "component.a.source: packages of a wasm registry",
        "component.a.key_value_stores",
        "component.a.sqlite_databases",
        "component.a.ai_models",
        "component.a.dependencies",
        "component.a.novelty: this field",
    ] {
        assert!(shown.contains(expected), "{expected:?} is not in {shown}");
    }
}

#[test]
fn mistakes_are_explained() {
    let with = |rest: &str| format!("spin_manifest_version = 2\n[application]\nname = \"x\"\n{rest}");
    let hello = "[component.a]\nsource = \"a.wasm\"\n";
    for (text, expected) in [
        ("name = 1".to_owned(), "is not a Spin manifest of version 1 or 2"),
        ("spin_manifest_version = 3".to_owned(), "is not a Spin manifest of version 1 or 2"),
        (with(""), "no trigger leads to a component"),
        (with("[[trigger.http]]\nroute = \"/\"\ncomponent = \"b\"\n"), "\"b\", which does not exist"),
        (
            with(&format!("[[trigger.http]]\nroute = \"no\"\ncomponent = \"a\"\n{hello}")),
            "must begin with a slash",
        ),
        (
            with(&format!("[[trigger.http]]\nroute = \"/a/.../b\"\ncomponent = \"a\"\n{hello}")),
            "a wildcard must be at its end",
        ),
        (
            with(&format!(
                "[[trigger.http]]\nroute = \"/a\"\ncomponent = \"a\"\n[[trigger.http]]\nroute = \"/a/\"\n\
                 component = \"b\"\n[component.b]\nsource = \"b.wasm\"\n{hello}"
            )),
            "the route /a is that of",
        ),
        (
            with(&format!(
                "[variables]\nv = {{}}\n[[trigger.http]]\nroute = \"/a\"\ncomponent = \"a\"\n{hello}"
            )),
            "variables.v has neither a default",
        ),
        (with("[[trigger.http]]\nroute = \"/\"\ncomponent = \"a\"\n[component.a]\n"), "source is missing"),
    ] {
        let error = format!("{:#}", parse(&text, "spin.toml").unwrap_err());
        assert!(error.contains(expected), "{expected:?} is not in {error}");
    }
}
