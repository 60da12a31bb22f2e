//! Invalid manifests, and routes without a function.

use anyhow::{Result, ensure};
use mayfly_e2e::{Up, digest_of, function, guest_or_skip};
use serde_json::{Value, json};

const FUNCTIONS: &str = "/apis/mayfly.dev/v1/namespaces/default/functions";

#[tokio::test(flavor = "multi_thread")]
async fn unknown_fields_are_refused_with_their_path() -> Result<()> {
    let up = Up::start().await?;
    let mut manifest = function("hello", &digest_of(b"x"), json!({"limits": {"memroy": "1Gi"}}));
    manifest["spec"]["colour"] = json!("blue");
    let answer = up.api()?.post(&format!("{FUNCTIONS}?fieldValidation=Strict"), &manifest).await?;
    ensure!(answer.status == 400, "{answer:?}");
    for path in ["spec.colour", "spec.limits.memroy"] {
        ensure!(answer.message().contains(path), "{path} is not in {answer:?}");
    }
    let finished = up.cli().with_stdin(&["apply", "-f", "-"], manifest.to_string().as_bytes()).await?;
    ensure!(finished.code != Some(0) && finished.stderr.contains("spec.colour"), "{finished:?}");
    ensure!(up.api()?.get(FUNCTIONS).await?.body["items"] == json!([]));
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_values_are_refused_all_at_once_with_their_paths() -> Result<()> {
    let up = Up::start().await?;
    let spec = json!({
        "limits": {"memory": "1Ki", "concurrency": 0},
        "egress": ["example.com"],
        "traffic": [{"latest": true, "percent": 40}],
    });
    let answer = up.api()?.post(FUNCTIONS, &function("hello", &digest_of(b"x"), spec)).await?;
    ensure!(answer.status == 422 && answer.body["reason"] == "Invalid", "{answer:?}");
    let causes = answer.body["details"]["causes"].as_array().cloned().unwrap_or_default();
    let fields: Vec<&str> = causes.iter().filter_map(|cause| cause["field"].as_str()).collect();
    for path in ["spec.limits.memory", "spec.limits.concurrency", "spec.egress[0]", "spec.traffic"] {
        ensure!(fields.iter().any(|field| field.starts_with(path)), "{path} is not in {fields:?}");
    }
    let no_source = json!({"apiVersion": "mayfly.dev/v1", "kind": "Function", "metadata": {"name": "f"}, "spec": {"source": {}}});
    let answer = up.api()?.post(FUNCTIONS, &no_source).await?;
    ensure!(answer.status == 422 && answer.message().contains("spec.source"), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_manifest_is_refused() -> Result<()> {
    let up = Up::start().await?;
    let api = up.api()?;
    let answer = api.call(http::Method::POST, FUNCTIONS, "application/json", mayfly_e2e::full("{")).await?;
    ensure!(answer.status == 400, "{answer:?}");
    let other = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}});
    let answer = api.post(FUNCTIONS, &other).await?;
    ensure!(answer.status == 400, "{answer:?}");
    let elsewhere = api.get("/apis/mayfly.dev/v1/namespaces/default/nonsense").await?;
    ensure!(elsewhere.status == 404, "{elsewhere:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revision_cannot_be_changed() -> Result<()> {
    guest_or_skip!("hello");
    let up = Up::start().await?;
    up.deploy("hello", "hello", &[]).await?;
    let path = "/apis/mayfly.dev/v1/namespaces/default/revisions/hello-00001";
    let patch = mayfly_e2e::full(json!({"spec": {"limits": {"memory": "128Mi"}}}).to_string());
    let answer = up.api()?.call(http::Method::PATCH, path, "application/merge-patch+json", patch).await?;
    ensure!(answer.status == 422 && answer.message().contains("immutable"), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_whose_component_is_missing_says_so() -> Result<()> {
    let up = Up::start().await?;
    let missing = digest_of(b"never uploaded");
    up.api()?.post(FUNCTIONS, &function("hello", &missing, json!({}))).await?;
    let told = |object: &Value| {
        let conditions = object["status"]["conditions"].as_array();
        let ready = conditions.into_iter().flatten().find(|condition| condition["type"] == "Ready");
        ready.is_some_and(|ready| ready["status"] == "False" && ready["message"] != "")
    };
    up.wait_until_function("hello", "says why it is not ready", told).await?;
    let answer = up.http().get("/fn/default/hello/").await?;
    ensure!(answer.status == 503 && answer.json()?["error"]["hint"].is_string(), "{answer:?}");
    // Uploading the referenced component is sufficient.
    if let Ok(content) =
        mayfly_e2e::guest("hello").and_then(|path| std::fs::read(path).map_err(|e| e.to_string()))
    {
        let digest = up.api()?.upload(content).await?;
        up.apply_function("hello", &digest, json!({})).await?;
        ensure!(up.http().get("/fn/default/hello/").await?.status == 200);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_to_nothing_says_where_routes_are_listed() -> Result<()> {
    let up = Up::start().await?;
    for path in ["/", "/nothing", "/fn/default/nobody/", "/fn/"] {
        let answer = up.http().get(path).await?;
        ensure!(answer.status == 404, "{path}: {answer:?}");
        let error = &answer.json()?["error"];
        ensure!(error["code"] == "not_found", "{path}: {answer:?}");
        ensure!(
            error["hint"].as_str().is_some_and(|hint| hint.contains("get functions")),
            "{path}: {answer:?}"
        );
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn two_functions_cannot_have_one_route() -> Result<()> {
    guest_or_skip!("env");
    let up = Up::start().await?;
    // The host of the tag `canary` of `a` is `canary-a`, which is also a function's own host.
    let component = up.upload("env").await?;
    let who = |name: &str| json!([{"name": "WHO", "value": name}]);
    let tagged = json!([{"latest": true, "percent": 100, "tag": "canary"}]);
    up.apply_function("a", &component, json!({"env": who("a"), "traffic": tagged})).await?;
    up.apply_function("canary-a", &component, json!({"env": who("canary-a")})).await?;
    // A function's own name takes precedence over another one's tag; both functions stay reachable.
    let asked = [
        ("/fn/default/a/", "localhost", "a"),
        ("/fn/default/canary-a/", "localhost", "canary-a"),
        ("/", "canary-a.default.fn.localhost", "canary-a"),
    ];
    for (path, host, who) in asked {
        let http = up.http();
        let request = http.request(http::Method::GET, path).header("host", host);
        let answer = http.call(request, mayfly_e2e::full("")).await?;
        ensure!(answer.status == 200 && answer.json()?["WHO"] == who, "{host}{path}: {answer:?}");
    }
    // The function whose tag has no host reports it.
    let lost = |function: &serde_json::Value| {
        let conditions = function["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|c| c["reason"] == "RouteConflict" && c["status"] == "False")
    };
    up.wait_until_function("a", "tells of the conflict", lost).await?;
    // A duplicate name is rejected by the API.
    let again = up.api()?.post(FUNCTIONS, &function("a", &component, json!({}))).await?;
    ensure!(again.status == 409 && again.body["reason"] == "AlreadyExists", "{again:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_token_is_refused() -> Result<()> {
    let up = Up::start().await?;
    let answer = up.api()?.with_token("guess").get(FUNCTIONS).await?;
    ensure!(answer.status == 401 && answer.body["kind"] == "Status", "{answer:?}");
    Ok(())
}
