//! The objects of an application: a Function for each component, a Secret with the secret variables, a Service for each
//! private component, and an Ingress with the routes. Pure.

use std::collections::BTreeMap;

use anyhow::Context as _;
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use mayfly_api::{Digest, validation, wellknown};
use serde_json::{Map, Value, json};

use super::{
    manifest::{SpinApp, SpinComponent, TriggerRoute},
    outbound,
    variables::VariableValues,
};
use crate::failure::{ErrorCode, Failure};

/// The label on every object of an application; its value is the application's name.
pub(crate) const LABEL_APPLICATION: &str = "mayfly.dev/spin-application";

/// Everything that a deployment creates.
#[derive(Debug)]
pub(crate) struct SpinPlan {
    /// Created before the functions, whose environment refers to it.
    pub(crate) secret: Option<Value>,
    /// In the order of the application's components.
    pub(crate) functions: Vec<PlannedFunction>,
    /// Created after the functions.
    pub(crate) services: Vec<Value>,
    pub(crate) ingress: Option<Value>,
}

#[derive(Debug)]
pub(crate) struct PlannedFunction {
    pub(crate) name: String,
    /// The Function without its source.
    pub(crate) manifest: Value,
}

/// The settings that do not come from the manifest.
pub(crate) struct PlanSettings<'a> {
    pub(crate) namespace: &'a str,
    pub(crate) host: &'a str,
    /// The archives of files by component.
    pub(crate) files: BTreeMap<String, Digest>,
}

/// Converts a Spin name to an object's name.
pub(crate) fn object_name(name: &str) -> String {
    name.to_lowercase().replace(['_', ' ', '.'], "-")
}

/// The name of a component's function.
pub(crate) fn function_name(app: &str, component: &str) -> anyhow::Result<String> {
    let (app, component) = (object_name(app), object_name(component));
    let name = if app == component { app } else { format!("{app}-{component}") };
    validation::function_name(&name).map_err(|why| {
        let what =
            format!("{name:?}, of an application and its component, cannot be a function's name: {why}");
        Failure::error(ErrorCode::Usage, what, "rename the application (--name) or the component")
    })?;
    Ok(name)
}

/// Plans an application; the error lists all hosts that a function cannot call.
pub(crate) fn plan(
    app: &SpinApp,
    values: &VariableValues,
    settings: &PlanSettings<'_>,
) -> anyhow::Result<SpinPlan> {
    let mut secrets = BTreeMap::new();
    let (mut functions, mut services, mut paths) = (Vec::new(), Vec::new(), Vec::new());
    let mut refused = Vec::new();
    for component in &app.components {
        let name = function_name(&app.name, &component.id)?;
        let egress = egress(component, values, &mut refused)?;
        let env = environment(app, component, values, &mut secrets)
            .with_context(|| format!("component.{}", component.id))?;
        let mut spec = json!({"visibility": "private", "egress": egress, "env": env});
        if let Some(files) = settings.files.get(&component.id) {
            spec["files"] = json!(files);
        }
        let manifest = json!({
            "apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": metadata(app, &name, settings), "spec": spec});
        paths.extend(component.routes.iter().flat_map(|route| ingress_paths(route, &name)));
        if component.is_private {
            services.push(service(app, &name, settings));
        }
        functions.push(PlannedFunction { name, manifest });
    }
    if !refused.is_empty() {
        return Err(Failure::error(
            ErrorCode::Unsupported,
            "functions cannot call these hosts",
            refused.join("\n"),
        ));
    }
    let secret = (!secrets.is_empty()).then(|| {
        json!({"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": secrets,
               "metadata": metadata(app, &secret_name(app), settings)})
    });
    let ingress = (!paths.is_empty()).then(|| ingress(app, paths, settings));
    Ok(SpinPlan { secret, functions, services, ingress })
}

fn secret_name(app: &SpinApp) -> String {
    format!("{}-variables", object_name(&app.name))
}

fn metadata(app: &SpinApp, name: &str, settings: &PlanSettings<'_>) -> Value {
    json!({"name": name, "namespace": settings.namespace, "labels": {LABEL_APPLICATION: object_name(&app.name)}})
}

/// The rules of `spec.egress`. Hosts that cannot be converted are added to `refused`, with the reasons.
fn egress(
    component: &SpinComponent,
    values: &VariableValues,
    refused: &mut Vec<String>,
) -> anyhow::Result<Vec<String>> {
    let mut egress = Vec::new();
    for allowed in &component.outbound_hosts {
        let allowed = values.template(allowed).with_context(|| format!("component.{}", component.id))?.text;
        match outbound::rules(&allowed) {
            Ok(rules) => egress.extend(rules),
            Err(why) => refused.push(format!("{allowed} (component {}): {why}", component.id)),
        }
    }
    Ok(egress)
}

/// The environment, followed by the variables, which guests read by the same names.
fn environment(
    app: &SpinApp,
    component: &SpinComponent,
    values: &VariableValues,
    secrets: &mut BTreeMap<String, String>,
) -> anyhow::Result<Vec<Value>> {
    let literal = |name: &str, value: &str| {
        // In the value of an environment variable `$(NAME)` refers to another one; Spin's values are literal.
        json!({"name": name, "value": value.replace('$', "$$")})
    };
    let mut env: Vec<_> = component.environment.iter().map(|(name, value)| literal(name, value)).collect();
    for (name, template) in &component.variables {
        if component.environment.contains_key(name) {
            anyhow::bail!(
                "{name:?} is in environment and in variables, which functions read by the same name"
            );
        }
        let value = values.template(template)?;
        if value.is_secret {
            let key = format!("{}.{name}", component.id);
            secrets.insert(key.clone(), BASE64.encode(value.text));
            let from = json!({"secretKeyRef": {"name": secret_name(app), "key": key}});
            env.push(json!({"name": name, "valueFrom": from}));
        } else {
            env.push(literal(name, &value.text));
        }
    }
    Ok(env)
}

fn ingress_paths(route: &TriggerRoute, function: &str) -> Vec<Value> {
    let backend = json!({"resource": {"apiGroup": "mayfly.dev", "kind": "Function", "name": function}});
    let path = |kind: &str, path: &str| json!({"path": path, "pathType": kind, "backend": backend});
    match route {
        TriggerRoute::Wildcard(front) if front.is_empty() => vec![path("Prefix", "/")],
        TriggerRoute::Wildcard(front) => vec![path("Prefix", front)],
        TriggerRoute::Exact(whole) if whole == "/" => vec![path("Exact", "/")],
        // Spin ignores a trailing slash.
        TriggerRoute::Exact(whole) => vec![path("Exact", whole), path("Exact", &format!("{whole}/"))],
    }
}

fn ingress(app: &SpinApp, paths: Vec<Value>, settings: &PlanSettings<'_>) -> Value {
    let mut metadata = metadata(app, &object_name(&app.name), settings);
    metadata["annotations"] =
        Value::Object(Map::from_iter([(wellknown::ANNOTATION_SPIN_ROUTES.to_owned(), Value::from("true"))]));
    json!({"apiVersion": "networking.k8s.io/v1", "kind": "Ingress", "metadata": metadata,
           "spec": {"rules": [{"host": settings.host, "http": {"paths": paths}}]}})
}

fn service(app: &SpinApp, function: &str, settings: &PlanSettings<'_>) -> Value {
    json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata(app, function, settings),
           "spec": {"selector": {wellknown::LABEL_FUNCTION: function}, "ports": [{"name": "http", "port": 80}]}})
}

#[cfg(test)]
mod tests {
    use super::{super::manifest::parse, *};

    const APP: &str = r#"
        spin_manifest_version = 2
        [application]
        name = "shop"
        [variables]
        who = { default = "Ada" }
        token = { required = true, secret = true }
        [[trigger.http]]
        route = "/..."
        component = "shop"
        [[trigger.http]]
        route = "/cart"
        component = "cart"
        [[trigger.http]]
        route = { private = true }
        component = "stock"
        [component.shop]
        source = "shop.wasm"
        [component.cart]
        source = "cart.wasm"
        allowed_outbound_hosts = ["https://{{ who }}.example.com"]
        environment = { MODE = "$(HOME)" }
        variables = { greeting = "hello {{ who }}", auth = "Bearer {{ token }}" }
        [component.stock]
        source = "stock.wasm"
    "#;

    fn planned(text: &str) -> anyhow::Result<SpinPlan> {
        let app = parse(text, "spin.toml").unwrap();
        let values =
            VariableValues::resolve(&app.variables, &[("token".into(), "t0p".into())], |_| None).unwrap();
        let files = [("shop".to_owned(), Digest::of(b"files"))].into();
        plan(&app, &values, &PlanSettings { namespace: "ns", host: "shop.example", files })
    }

    #[test]
    fn an_application_becomes_objects() {
        let plan = planned(APP).unwrap();
        let names: Vec<_> = plan.functions.iter().map(|function| function.name.as_str()).collect();
        assert_eq!(names, ["shop-cart", "shop", "shop-stock"]);
        let spec = |at: usize| plan.functions[at].manifest["spec"].clone();
        assert_eq!(
            spec(0),
            json!({"visibility": "private", "egress": ["https://Ada.example.com"], "env": [
                {"name": "MODE", "value": "$$(HOME)"},
                {"name": "auth", "valueFrom": {"secretKeyRef": {"name": "shop-variables", "key": "cart.auth"}}},
                {"name": "greeting", "value": "hello Ada"}]})
        );
        assert_eq!(spec(1)["files"], json!(Digest::of(b"files")));
        let secret = plan.secret.unwrap();
        assert_eq!(secret["data"], json!({"cart.auth": BASE64.encode("Bearer t0p")}));
        assert_eq!(secret["metadata"]["labels"][LABEL_APPLICATION], "shop");
        assert_eq!(plan.services.len(), 1);
        assert_eq!(plan.services[0]["spec"]["selector"], json!({"mayfly.dev/function": "shop-stock"}));
        let rules = plan.ingress.unwrap()["spec"]["rules"].clone();
        assert_eq!(rules[0]["host"], "shop.example");
        let paths = rules[0]["http"]["paths"].as_array().unwrap();
        let short: Vec<_> = paths
            .iter()
            .map(|path| format!("{} {}", path["pathType"].as_str().unwrap(), path["path"].as_str().unwrap()))
            .collect();
        assert_eq!(short, ["Exact /cart", "Exact /cart/", "Prefix /"]);
        for function in &plan.functions {
            let mut spec = function.manifest["spec"].clone();
            spec["source"] = json!({"component": Digest::of(b"x")});
            let spec: mayfly_api::FunctionSpec = serde_json::from_value(spec).unwrap();
            assert_eq!(validation::function(&function.name, &spec), []);
        }
    }

    #[test]
    fn hosts_and_names_that_cannot_be_are_refused() {
        let text = APP.replace("https://{{ who }}.example.com\"", "redis://r:1\", \"https://*:*\"");
        let error = planned(&text).unwrap_err().to_string();
        assert!(error.contains("redis://r:1 (component cart)") && error.contains("https://*:*"), "{error}");
        let text = APP.replace("variables = { greeting", "variables = { MODE = \"x\", greeting");
        let error = format!("{:#}", planned(&text).unwrap_err());
        assert!(error.contains("in environment and in variables"), "{error}");
        assert!(function_name("Ünder", "x").is_err() && function_name("a", &"x".repeat(60)).is_err());
        assert_eq!(function_name("My_App", "my-app").unwrap(), "my-app");
    }
}
