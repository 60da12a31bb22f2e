//! The audit log: the events of requests, by the policy.

use std::{path::Path, sync::Arc, time::Duration};

use http::StatusCode;
use mayfly_apiserver::Audit;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::support::{Fixture, TOKEN, request};

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

#[tokio::test]
async fn refused_credentials_and_source_addresses_are_recorded() {
    let policy = "
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, resources: [{resources: [secrets]}]}
- {level: Metadata, userGroups: ['system:masters'], resources: [{resources: [configmaps]}]}
";
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.log");
    let audit = Arc::new(Audit::create(policy, &log).unwrap());
    let server = Fixture::with(|config| config.audit = Some(audit), |_| {}).await;
    let (address, _serving) = server.listen().await;
    let send = async |path: &str, headers: &str| {
        let mut socket = TcpStream::connect(address).await.unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).await.unwrap();
        answer.split(' ').nth(1).unwrap().parse::<u16>().unwrap()
    };
    assert_eq!(send(SECRETS, "").await, 401);
    assert_eq!(send(SECRETS, "Authorization: Bearer forged\r\nX-Real-Ip: 10.0.0.1\r\n").await, 401);
    // A rule about groups is not about a request without a valid user.
    assert_eq!(send(MAPS, "").await, 401);
    let forwarded = format!("Authorization: Bearer {TOKEN}\r\nX-Forwarded-For: 10.0.0.2, x, ::1\r\n");
    assert_eq!(send(MAPS, &forwarded).await, 200);

    let events = events(&log, 3).await;
    let [none, forged, admin] = &events[..] else { panic!("{events:?}") };
    for event in [none, forged] {
        assert_eq!((&event["stage"], &event["user"]), (&json!("ResponseStarted"), &json!({})), "{event}");
        assert_eq!((&event["verb"], &event["objectRef"]["resource"]), (&json!("list"), &json!("secrets")));
        assert_eq!(event["responseStatus"]["code"], 401);
        assert!(event["annotations"].is_null(), "{event}");
    }
    assert_eq!(none["responseStatus"]["message"], "Authentication failed, no credentials provided");
    assert_eq!(none["sourceIPs"], json!(["127.0.0.1"]));
    assert_eq!(forged["responseStatus"]["message"], "Authentication failed, attempted: bearer");
    assert_eq!(forged["sourceIPs"], json!(["10.0.0.1", "127.0.0.1"]));
    assert!(!forged.to_string().contains("forged"), "the token is not recorded: {forged}");
    assert_eq!(admin["stage"], "ResponseComplete");
    assert_eq!(admin["sourceIPs"], json!(["10.0.0.2", "::1", "127.0.0.1"]));
}
