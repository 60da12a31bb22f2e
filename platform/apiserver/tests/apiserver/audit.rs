//! The audit log: the events of requests, by the policy.

use std::{path::Path, sync::Arc, time::Duration};

use http::StatusCode;
use mayfly_apiserver::Audit;
use serde_json::{Value, json};

use crate::support::{Fixture, request};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";
const SECRETS: &str = "/api/v1/namespaces/default/secrets";
const POLICY: &str = "
apiVersion: audit.k8s.io/v1
kind: Policy
omitManagedFields: true
rules:
- {level: None, nonResourceURLs: ['/api*']}
- {level: Metadata, resources: [{resources: [secrets]}], omitStages: [RequestReceived]}
- {level: Request, verbs: [create], omitStages: [RequestReceived]}
- {level: RequestResponse, verbs: [get], omitStages: [RequestReceived]}
- {level: Metadata, verbs: [watch]}
- {level: None}
";

/// Waits until the log has this many events.
async fn events(log: &Path, count: usize) -> Vec<Value> {
    for _ in 0..6_000 {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        if text.ends_with('\n') && text.lines().count() >= count {
            return text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("no {count} events in a minute: {:?}", std::fs::read_to_string(log));
}

#[tokio::test]
async fn requests_are_recorded_as_the_policy_says() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.log");
    let audit = Arc::new(Audit::create(POLICY, &log).unwrap());
    let server = Fixture::with(|config| config.audit = Some(audit), |_| {}).await;
    // Components of the server make requests, too: only the requests of these users are checked.
    let map = json!({"metadata": {"name": "a"}, "data": {"k": "v"}});
    let (code, _) = server.call("POST", MAPS, map.clone()).await;
    assert_eq!(code, StatusCode::CREATED);
    let (code, _) =
        server.call("POST", SECRETS, json!({"metadata": {"name": "s"}, "stringData": {"p": "hidden"}})).await;
    assert_eq!(code, StatusCode::CREATED);
    let (code, _) = server.call("GET", &format!("{MAPS}/a"), Value::Null).await;
    assert_eq!(code, StatusCode::OK);
    server.call("DELETE", &format!("{MAPS}/a"), Value::Null).await;
    server.call("GET", "/apis", Value::Null).await;
    let asked = request("POST", MAPS)
        .header("content-type", "application/json")
        .header("impersonate-user", "jane")
        .header("user-agent", "test/1");
    let response = server.send(asked.body(map.to_string().into()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::FORBIDDEN);
    let watch = server
        .send(request("GET", &format!("{MAPS}?watch=1&timeoutSeconds=1")).body("".into()).unwrap())
        .await;
    drop(watch);

    let of = |event: &Value| {
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        (text("verb"), event["objectRef"]["resource"].as_str().unwrap_or_default().to_owned(), text("stage"))
    };
    let events = events(&log, 7).await;
    let seen: Vec<_> = events.iter().map(of).collect();
    let complete =
        |verb: &str, resource: &str| (verb.to_owned(), resource.to_owned(), "ResponseComplete".to_owned());
    let watched = |stage: &str| ("watch".to_owned(), "configmaps".to_owned(), stage.to_owned());
    assert_eq!(
        seen,
        [
            complete("create", "configmaps"),
            complete("create", "secrets"),
            complete("get", "configmaps"),
            complete("create", "configmaps"),
            watched("RequestReceived"),
            watched("ResponseStarted"),
            watched("ResponseComplete"),
        ]
    );
    let [created, secret, got, refused, ..] = &events[..] else { panic!("{events:?}") };
    assert_eq!(created["requestObject"]["data"], json!({"k": "v"}));
    assert!(created["responseObject"].is_null() && created["responseStatus"]["code"] == 201, "{created}");
    assert_eq!(created["annotations"]["authorization.k8s.io/decision"], "allow");
    assert!(created["user"]["groups"].to_string().contains("system:masters"), "{created}");
    assert!(!secret.to_string().contains("hidden"), "{secret}");
    assert_eq!(got["responseObject"]["data"], json!({"k": "v"}));
    assert!(got["responseObject"]["metadata"]["managedFields"].is_null(), "{got}");
    assert_eq!(
        got["objectRef"],
        json!({"resource": "configmaps", "apiVersion": "v1", "namespace": "default", "name": "a"})
    );
    assert_eq!(
        (&refused["impersonatedUser"]["username"], &refused["userAgent"]),
        (&json!("jane"), &json!("test/1"))
    );
    assert_eq!(refused["annotations"]["authorization.k8s.io/decision"], "forbid");
    assert_eq!(refused["responseStatus"]["reason"], "Forbidden");
    assert!(
        refused["responseStatus"]["message"].as_str().unwrap().contains("cannot create resource"),
        "{refused}"
    );
}
