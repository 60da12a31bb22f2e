use serde_json::{Value, json};

use super::*;

fn ingress(name: &str, created: &str, spec: Value) -> Ingress {
    let metadata = json!({"namespace": "shop", "name": name, "creationTimestamp": created});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
}

fn service(name: &str) -> Value {
    json!({"service": {"name": name, "port": {"number": 80}}})
}

fn path(kind: &str, path: &str, backend: &str) -> Value {
    json!({"path": path, "pathType": kind, "backend": service(backend)})
}

fn rule(host: Option<&str>, paths: &[Value]) -> Value {
    json!({"host": host, "http": {"paths": paths}})
}

/// The table of these Ingresses. Services called `fn-NAME` select the function NAME; `gone` does not exist; every other
/// Service has one endpoint.
fn table(ingresses: &[Ingress]) -> IngressTable {
    table_at(ingresses, 0)
}

/// The same, with the turn at which it begins.
fn table_at(ingresses: &[Ingress], turn: usize) -> IngressTable {
    let service = |key: &ObjectKey| {
        let selector = match key.name.strip_prefix("fn-") {
            Some(function) => json!({"mayfly.dev/function": function}),
            None => json!({"app": key.name}),
        };
        let spec = json!({"selector": selector, "ports": [{"name": "http", "port": 80}, {"name": "other", "port": 81}]});
        let metadata = json!({"namespace": key.namespace, "name": key.name});
        let service = serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap();
        (key.name != "gone").then(|| Arc::new(service))
    };
    let slices = |_: &ObjectKey| {
        let slice = json!({"addressType": "IPv4", "metadata": {},
            "ports": [{"name": "http", "port": 8080}, {"name": "other", "port": 9090}],
            "endpoints": [
                {"addresses": ["10.0.0.2"], "conditions": {"ready": true}}, {"addresses": ["10.0.0.1"]},
                {"addresses": ["10.0.0.3"], "conditions": {"ready": false, "serving": true, "terminating": true}}]});
        vec![Arc::new(serde_json::from_value(slice).unwrap())]
    };
    let ingresses = ingresses.iter().collect();
    plan(&IngressObjects { ingresses, service: &service, slices: &slices, turn }).0
}

/// The Service or function behind a URL's host and path.
fn found(table: &IngressTable, host: &str, path: &str) -> String {
    match table.of_host(host, path).or_else(|| table.of_any_host(path)).map(|found| &**found) {
        None => "-".to_owned(),
        Some(IngressBackend::Function { key, .. }) => format!("function {key}"),
        Some(IngressBackend::Endpoints(of)) => {
            of.service.strip_prefix("shop/").unwrap_or(&of.service).to_owned()
        }
    }
}

#[test]
fn hosts_and_paths_follow_upstreams_precedence() {
    let rules = [
        rule(
            Some("shop.example.com"),
            &[
                path("Prefix", "/", "root"),
                path("Prefix", "/cart", "cart"),
                path("Exact", "/cart", "cart-exact"),
                path("Prefix", "/cart/items/", "items"),
                path("ImplementationSpecific", "/api", "api"),
            ],
        ),
        rule(Some("*.example.com"), &[path("Prefix", "/", "wild")]),
        rule(Some("exact.only"), &[path("Exact", "/a", "a")]),
        rule(None, &[path("Prefix", "/any", "any")]),
    ];
    let spec = json!({"rules": rules, "defaultBackend": service("default")});
    let table = table(&[ingress("one", "2026-01-01T00:00:00Z", spec)]);
    for (host, path, expected) in [
        ("shop.example.com", "/", "root"),
        ("Shop.Example.com.:8080", "/x", "root"),
        ("shop.example.com", "/cart", "cart-exact"),
        ("shop.example.com", "/cart/", "cart"),
        ("shop.example.com", "/cart/1", "cart"),
        ("shop.example.com", "/cartoon", "root"),
        ("shop.example.com", "/cart/items", "items"),
        ("shop.example.com", "/cart/items/1", "items"),
        ("shop.example.com", "/api/v1", "api"),
        ("other.example.com", "/", "wild"),
        // The asterisk matches one label.
        ("a.b.example.com", "/", "default"),
        ("example.com", "/", "default"),
        ("exact.only", "/a", "a"),
        ("exact.only", "/a/", "default"),
        ("exact.only", "/any/thing", "any"),
        ("elsewhere", "/any", "any"),
        ("elsewhere", "/anything", "default"),
    ] {
        assert_eq!(found(&table, host, path), expected, "{host} {path}");
    }
}

#[test]
fn the_older_ingress_keeps_a_path() {
    let spec = |backend: &str| json!({"rules": [rule(Some("a"), &[path("Prefix", "/", backend)])]});
    let younger = ingress("a-first-by-name", "2026-01-02T00:00:00Z", spec("younger"));
    let older = ingress("older", "2026-01-01T00:00:00Z", spec("older"));
    assert_eq!(found(&table(&[younger, older]), "a", "/"), "older");
}

/// A namespace cannot take over the requests for functions of another one.
#[test]
fn hosts_of_functions_are_their_namespaces() {
    let paths = [path("Prefix", "/", "web")];
    for (host, expected) in [
        ("pay.shop.fn.localhost", "web"),
        ("*.shop.fn.localhost", "web"),
        ("pay.other.fn.localhost", "-"),
        ("Pay.Other.FN.localhost", "-"),
        ("*.other.fn.localhost", "-"),
        ("fn.localhost", "web"),
    ] {
        let spec = json!({"rules": [rule(Some(host), &paths)]});
        let table = table(&[ingress("one", "2026-01-01T00:00:00Z", spec)]);
        assert_eq!(found(&table, &host.replace('*', "pay"), "/"), expected, "{host}");
    }
}

#[test]
fn other_classes_are_left_to_others() {
    let spec = |class: Value| json!({"ingressClassName": class, "defaultBackend": service("web")});
    for (class, expected) in [(Value::Null, "web"), (json!("mayfly"), "web"), (json!("nginx"), "-")] {
        let table = table(&[ingress("one", "2026-01-01T00:00:00Z", spec(class.clone()))]);
        assert_eq!(found(&table, "x", "/"), expected, "{class}");
        assert_eq!(table.is_empty(), expected == "-");
    }
    let mut annotated = ingress("one", "2026-01-01T00:00:00Z", spec(Value::Null));
    annotated.metadata.annotations =
        Some([("kubernetes.io/ingress.class".to_owned(), "nginx".to_owned())].into());
    assert_eq!(found(&table(&[annotated]), "x", "/"), "-");
}

#[test]
fn backends_are_services_and_functions() {
    let with =
        |backend: Value| table(&[ingress("one", "2026-01-01T00:00:00Z", json!({"defaultBackend": backend}))]);
    let function = json!({"resource": {"apiGroup": "mayfly.dev", "kind": "Function", "name": "hello"}});
    assert_eq!(found(&with(function), "x", "/"), "function shop/hello");
    assert_eq!(found(&with(service("fn-hello")), "x", "/"), "function shop/hello");
    let bucket = json!({"resource": {"apiGroup": "storage.example", "kind": "Bucket", "name": "b"}});
    assert_eq!(found(&with(bucket), "x", "/"), "-");
    for (port, expected) in [
        (json!({"number": 80}), "10.0.0.1:8080 10.0.0.2:8080"),
        (json!({"name": "other"}), "10.0.0.1:9090 10.0.0.2:9090"),
        (json!({"number": 82}), "the Service has no such port"),
    ] {
        let table = with(json!({"service": {"name": "web", "port": port}}));
        let Some(IngressBackend::Endpoints(of)) = table.of_any_host("/").map(|found| &**found) else {
            panic!()
        };
        let mut all: Vec<_> = of.in_turn().map(|at| at.to_string()).collect();
        let first = all.first().cloned();
        assert!(
            first.is_none() || first != of.in_turn().next().map(|at| at.to_string()),
            "the next one is next"
        );
        all.sort();
        let said = if all.is_empty() { of.missing.to_owned() } else { all.join(" ") };
        assert_eq!(said, expected, "{port}");
    }
    let table = with(service("gone"));
    let Some(IngressBackend::Endpoints(of)) = table.of_any_host("/").map(|found| &**found) else { panic!() };
    assert_eq!((of.in_turn().count(), of.missing), (0, "there is no such Service"));
}

/// A table replaces another one whenever an endpoint changes.
#[test]
fn a_table_begins_with_any_endpoint() {
    let spec = json!({"defaultBackend": {"service": {"name": "web", "port": {"number": 80}}}});
    let ingress = ingress("one", "2026-01-01T00:00:00Z", spec);
    let first = |turn: usize| {
        let table = table_at(std::slice::from_ref(&ingress), turn);
        match table.of_any_host("/").map(|found| &**found) {
            Some(IngressBackend::Endpoints(of)) => of.in_turn().next().map(|at| at.to_string()),
            _ => None,
        }
    };
    let firsts = [0, 1, 2].map(|turn| first(turn).unwrap());
    assert_eq!(firsts, ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.1:8080"]);
}

#[test]
fn functions_of_spin_applications_are_told_their_routes() {
    let function = json!({"resource": {"apiGroup": "mayfly.dev", "kind": "Function", "name": "f"}});
    let paths = [
        json!({"path": "/static", "pathType": "Prefix", "backend": function}),
        json!({"path": "/one", "pathType": "Exact", "backend": service("fn-other")}),
    ];
    let mut spin = ingress("spin", "2026-01-01T00:00:00Z", json!({"rules": [rule(Some("app"), &paths)]}));
    let route = |ingress: &Ingress, path: &str| {
        let table = table(std::slice::from_ref(ingress));
        match table.of_host("app", path).map(|found| &**found) {
            Some(IngressBackend::Function { spin, .. }) => spin.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(route(&spin, "/static/a"), None, "without the annotation");
    let annotations = [(wellknown::ANNOTATION_SPIN_ROUTES.to_owned(), "true".to_owned())];
    spin.metadata.annotations = Some(annotations.into());
    assert_eq!(route(&spin, "/static/a"), SpinRoute::of("/static", PathMatch::Prefix));
    assert_eq!(route(&spin, "/one"), SpinRoute::of("/one", PathMatch::Exact));
    assert!(route(&spin, "/one").is_some());
}
