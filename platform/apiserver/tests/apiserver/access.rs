//! Authentication, paths that need none, discovery, and requests that are refused before their verb.

use axum::body::Body;
use http::{Request, StatusCode};
use http_body_util::BodyExt;
use serde_json::{Value, json};

use crate::support::{self, Fixture, config_map, json_of, request};

#[tokio::test]
async fn strangers_see_health_and_nothing_else() {
    let server = Fixture::new().await;
    for (path, code) in [
        ("/healthz", 200),
        ("/livez", 200),
        ("/readyz?verbose", 200),
        ("/version", 200),
        ("/api", 401),
        ("/apis/mayfly.dev/v1/functions", 401),
        ("/artifacts", 401),
        ("/openapi/v3", 401),
        ("/nothing", 401),
    ] {
        let response = server.send(Request::get(path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status().as_u16(), code, "{path}");
    }
    let wrong = Request::get("/api").header("authorization", "Bearer wrong").body(Body::empty()).unwrap();
    let (code, status) = json_of(server.send(wrong).await).await;
    assert_eq!((code, status["reason"].as_str()), (StatusCode::UNAUTHORIZED, Some("Unauthorized")));
    server.server.shut_down();
    let response = server.send(Request::get("/readyz").body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn everyone_gets_the_certificate_of_the_servers_authority() {
    let get = || Request::get("/cacerts").body(Body::empty()).unwrap();
    let server = Fixture::with(|config| config.serving_authority_pem = Some("PEM".into()), |_| {}).await;
    let response = server.send(get()).await;
    assert_eq!(response.headers()["content-type"], "text/plain; charset=utf-8");
    assert_eq!(json_of(response).await, (StatusCode::OK, json!("PEM")));
    let post = Request::post("/cacerts").body(Body::empty()).unwrap();
    assert_eq!(server.send(post).await.status(), StatusCode::UNAUTHORIZED);
    let server = Fixture::new().await;
    assert_eq!(server.send(get()).await.status(), StatusCode::UNAUTHORIZED);
    assert_eq!(server.get("/cacerts").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn unknown_paths_and_methods() {
    let server = Fixture::new().await;
    for (method, path, code) in [
        ("GET", "/nothing", 404),
        ("GET", "/api/v1/widgets", 404),
        ("GET", "/apis/nobody.dev/v1", 404),
        ("GET", "/api/v1/namespaces/default/pods/p/nothing", 404),
        ("GET", "/openapi/v1", 404),
        ("POST", "/api/v1/namespaces/default/pods/p", 405),
        ("PUT", "/api/v1/namespaces/default/pods", 405),
        ("POST", "/api/v1/pods", 405),
        ("DELETE", "/api/v1/namespaces/default/pods/p/status", 405),
        ("GET", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", 405),
    ] {
        let body = json!({"metadata": {"name": "p"}});
        let (found, status) = server.call(method, path, body).await;
        assert_eq!(found.as_u16(), code, "{method} {path}: {status}");
        // Outside of the API upstream's router answers, in plain text.
        match path {
            "/nothing" | "/apis/nobody.dev/v1" => assert_eq!(status, json!("404 page not found\n"), "{path}"),
            _ => assert_eq!(status["kind"], "Status", "{method} {path}: {status}"),
        }
    }
}

#[tokio::test]
async fn questions_about_oneself() {
    let server = Fixture::new().await;
    let review = json!({"spec": {"resourceAttributes": {"verb": "create", "resource": "pods"}}});
    let (code, answer) =
        server.call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review).await;
    assert_eq!((code, &answer["status"]["allowed"]), (StatusCode::CREATED, &json!(true)));
    let (_, answer) =
        server.call("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", json!({})).await;
    assert_eq!(answer["status"]["userInfo"]["username"], "mayfly-admin");
}

#[tokio::test]
async fn both_forms_of_discovery_agree() {
    let server = Fixture::new().await;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
    let mut aggregated = Vec::new();
    for path in ["/api", "/apis"] {
        let (_, list) = server.get_as(path, accept).await;
        assert_eq!(list["kind"], "APIGroupDiscoveryList");
        for group in list["items"].as_array().unwrap() {
            for version in group["versions"].as_array().unwrap() {
                for resource in version["resources"].as_array().unwrap() {
                    let name = group["metadata"]["name"].as_str().unwrap_or("");
                    aggregated.push(format!(
                        "{name}/{}/{}",
                        version["version"].as_str().unwrap(),
                        resource["resource"].as_str().unwrap()
                    ));
                    for sub in resource["subresources"].as_array().into_iter().flatten() {
                        aggregated.push(format!(
                            "{name}/{}/{}/{}",
                            version["version"].as_str().unwrap(),
                            resource["resource"].as_str().unwrap(),
                            sub["subresource"].as_str().unwrap()
                        ));
                    }
                }
            }
        }
    }
    let mut legacy = Vec::new();
    let mut paths = vec![(String::new(), "/api/v1".to_owned())];
    for group in server.get("/apis").await.1["groups"].as_array().unwrap() {
        let name = group["name"].as_str().unwrap();
        for version in group["versions"].as_array().unwrap() {
            let version = version["groupVersion"].as_str().unwrap();
            paths.push((name.to_owned(), format!("/apis/{version}")));
        }
    }
    for (group, path) in paths {
        let (code, list) = server.get(&path).await;
        assert_eq!(code, StatusCode::OK);
        let version = list["groupVersion"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
        for resource in list["resources"].as_array().unwrap() {
            legacy.push(format!("{group}/{version}/{}", resource["name"].as_str().unwrap()));
        }
    }
    aggregated.sort();
    legacy.sort();
    assert_eq!(aggregated, legacy);
    assert!(legacy.contains(&"mayfly.dev/v1/functions/log".to_owned()), "{legacy:?}");
    assert!(legacy.contains(&"/v1/pods/binding".to_owned()), "{legacy:?}");
}

#[tokio::test]
async fn requests_are_counted() {
    let server = Fixture::new().await;
    server.get("/api/v1/pods").await;
    server.get("/api/v1/namespaces/default/pods/absent/status").await;
    server.call("POST", "/api/v1/namespaces/default/pods", support::pod("p")).await;
    let (path, form) = ("/api/v1/namespaces/default/pods/p?fieldManager=m", "application/apply-patch+yaml");
    server.call_as("PATCH", path, form, "[]".into()).await;
    let mut text = String::new();
    prometheus_client::encoding::text::encode(&mut text, &server.metrics).unwrap();
    for line in [
        "apiserver_request_total{component=\"apiserver\",verb=\"LIST\",group=\"\",version=\"v1\",resource=\"pods\",subresource=\"\",scope=\"cluster\",code=\"200\"} 1",
        "verb=\"GET\",group=\"\",version=\"v1\",resource=\"pods\",subresource=\"status\",scope=\"resource\",code=\"404\"} 1",
        "verb=\"POST\",group=\"\",version=\"v1\",resource=\"pods\",subresource=\"\",scope=\"namespace\",code=\"201\"} 1",
        "verb=\"APPLY\",group=\"\",version=\"v1\",resource=\"pods\",subresource=\"\",scope=\"resource\",code=\"400\"} 1",
        "apiserver_request_duration_seconds_bucket{le=\"60.0\",component=\"apiserver\",verb=\"LIST\"",
        "apiserver_current_inflight_requests{request_kind=\"readOnly\"} 0",
        "apiserver_current_inflight_requests{request_kind=\"mutating\"} 0",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
}

#[tokio::test]
async fn requests_in_flight_are_bounded() {
    let server = Fixture::with(|config| config.requests_in_flight_max = 1, |_| {}).await;
    let (sender, body) = tokio::sync::mpsc::channel::<Result<bytes::Bytes, std::io::Error>>(1);
    let slow = support::request("POST", "/api/v1/namespaces/default/configmaps")
        .header("content-type", "application/json")
        .body(Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(body)))
        .unwrap();
    let (slow, (code, status)) = tokio::join!(server.send(slow), async {
        let refused = server.get("/api/v1/pods").await;
        sender.send(Ok(support::config_map("slow", json!({})).to_string().into())).await.unwrap();
        drop(sender);
        refused
    });
    assert_eq!((code, status["reason"].as_str()), (StatusCode::TOO_MANY_REQUESTS, Some("TooManyRequests")));
    assert_eq!(slow.status(), StatusCode::CREATED);
    assert_eq!(server.get("/api/v1/pods").await.0, StatusCode::OK);
}

#[tokio::test]
async fn slow_requests_are_ended() {
    let server =
        Fixture::with(|config| config.request_timeout = std::time::Duration::from_millis(50), |_| {}).await;
    let endless = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    let request = support::request("POST", "/api/v1/namespaces/default/configmaps").body(endless).unwrap();
    let (code, status) = json_of(server.send(request).await).await;
    assert_eq!((code, status["reason"].as_str()), (StatusCode::GATEWAY_TIMEOUT, Some("Timeout")));
}

#[tokio::test]
async fn one_may_act_as_someone_else() {
    let server = Fixture::new().await;
    let act = |method: &'static str, path: &'static str, headers: &'static [(&'static str, &'static str)]| {
        let mut request = support::request(method, path).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        // Only one of the two reviews reads it.
        let review = r#"{"spec": {"resourceAttributes": {"verb": "list", "resource": "pods"}}}"#;
        let body = if method == "POST" { Body::from(review) } else { Body::empty() };
        server.send(request.body(body).unwrap())
    };
    let ada = &[("impersonate-user", "ada")];
    assert_eq!(act("GET", "/api/v1/pods", ada).await.status(), StatusCode::FORBIDDEN);
    assert_eq!(act("GET", "/artifacts", ada).await.status(), StatusCode::FORBIDDEN);
    assert_eq!(act("GET", "/apis", ada).await.status(), StatusCode::OK);
    let admin = &[("impersonate-user", "ada"), ("impersonate-group", "system:masters")];
    assert_eq!(act("GET", "/api/v1/pods", admin).await.status(), StatusCode::OK);
    let (_, answer) =
        json_of(act("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", ada).await).await;
    assert_eq!(answer["status"]["allowed"], false);
    let (_, answer) =
        json_of(act("POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", ada).await).await;
    assert_eq!(answer["status"]["userInfo"]["username"], "ada");
    // A group without a user: kube-apiserver answers 500 too.
    let (status, answer) = json_of(act("GET", "/api/v1/pods", &[("impersonate-group", "x")]).await).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    let expected =
        "Internal Server Error: \"/api/v1/pods\": requested [{Group  x    }] without impersonating a user\n";
    assert_eq!(answer, expected, "a line of text, as from upstream's filter");
}

/// Browsers cannot set the header `Authorization` of a WebSocket.
#[tokio::test]
async fn a_websocket_is_authenticated_by_a_subprotocol() {
    let server = Fixture::new().await;
    let open = async |token: &str| {
        let protocols = format!("base64url.bearer.authorization.k8s.io.{token}, v5.channel.k8s.io");
        let exec = Request::get("/api/v1/namespaces/default/pods/none/exec?command=ls")
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-protocol", protocols);
        server.send(exec.body(Body::empty()).unwrap()).await.status()
    };
    // `test-token`, the administrator's token of these tests, in base64url: there is no such pod.
    assert_eq!(open("dGVzdC10b2tlbg").await, StatusCode::NOT_FOUND);
    assert_eq!(open("d3Jvbmc").await, StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn odd_paths_are_refused_and_harm_nobody() {
    let server = Fixture::new().await;
    let long = format!("/api/v1/namespaces/default/pods?labelSelector={}", "a".repeat(20_000));
    for (path, code) in [
        ("/api/v1/namespaces/default/pods/%2e%2e%2f", 404),
        ("/api/v1/namespaces/default/pods/%00", 404),
        ("/api/v1/namespaces/default/pods/%ff", 404),
        ("/api/v1/namespaces//pods", 404),
        ("//api//v1//pods", 200),
        ("/api/v1/namespaces/default/pods/a/b/c/d", 404),
        ("/artifacts/../../etc/passwd", 404),
        (long.as_str(), 400),
    ] {
        let (found, status) = server.get(path).await;
        assert_eq!(found.as_u16(), code, "{path:.60}: {status}");
    }
}

/// On a full disk, writes are refused with an explanation, and reads succeed.
#[tokio::test]
async fn a_full_disk_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = mayfly_store::Config::new(folder.path().join("store"));
    config.file_bytes_max = 1 << 20;
    let store = mayfly_store::Store::open(config).unwrap();
    let server = Fixture::with(|_| {}, |deps| deps.store = store).await;
    let path = "/api/v1/namespaces/default/configmaps";
    let mut last = (StatusCode::OK, serde_json::Value::Null);
    for n in 0..100 {
        let body = support::config_map(&format!("m{n}"), json!({"k": "v".repeat(100_000)}));
        last = server.call("POST", path, body).await;
        if last.0 != StatusCode::CREATED {
            break;
        }
    }
    assert_eq!(last.0, StatusCode::INSUFFICIENT_STORAGE, "{}", last.1);
    assert!(last.1["message"].as_str().unwrap().contains("disk is full"), "{}", last.1);
    assert_eq!(server.get(&format!("{path}/m0")).await.0, StatusCode::OK);
}

/// For an HTTP/2 client a body in a response to HEAD is a broken stream; the headers describe it all the same.
#[tokio::test]
async fn head_answers_without_a_body() {
    let server = Fixture::new().await;
    for (path, code, length) in [("/healthz", 200, Some("2")), ("/api/v1/nothing", 404, None)] {
        let response = server.send(request("HEAD", path).body(Body::empty()).unwrap()).await;
        assert_eq!(response.status().as_u16(), code, "{path}");
        let said = response.headers()["content-length"].to_str().unwrap().to_owned();
        assert_eq!(length.unwrap_or(&said), said, "{path}");
        assert!(response.into_body().collect().await.unwrap().to_bytes().is_empty(), "{path}");
    }
}

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";

/// A request as another user.
async fn call_as(server: &Fixture, user: &str, method: &str, path: &str, body: Value) -> (StatusCode, Value) {
    let body = if method == "GET" { Body::empty() } else { Body::from(body.to_string()) };
    let request = request(method, path).header("impersonate-user", user);
    json_of(server.send(request.header("content-type", "application/json").body(body).unwrap()).await).await
}

async fn bind(server: &Fixture, user: &str, rules: Value) {
    let role = json!({"metadata": {"name": user}, "rules": rules});
    let (code, answer) = server.call("POST", &format!("{RBAC}/roles"), role).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    let group = "rbac.authorization.k8s.io";
    let binding = json!({"metadata": {"name": user},
        "roleRef": {"apiGroup": group, "kind": "Role", "name": user},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}]});
    let (code, answer) = server.call("POST", &format!("{RBAC}/rolebindings"), binding).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
}

#[tokio::test]
async fn roles_allow_what_they_say_from_their_answer_on() {
    let server = Fixture::new().await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let (code, refused) = call_as(&server, "ann", "GET", maps, Value::Null).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    assert_eq!(
        refused["message"],
        "configmaps is forbidden: User \"ann\" cannot list resource \"configmaps\" in API group \"\" in the \
         namespace \"default\""
    );
    bind(
        &server,
        "ann",
        json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list", "create"]}]),
    )
    .await;
    assert_eq!(call_as(&server, "ann", "GET", maps, Value::Null).await.0, StatusCode::OK);
    assert_eq!(
        call_as(&server, "ann", "GET", "/api/v1/namespaces/kube-system/configmaps", Value::Null).await.0,
        StatusCode::FORBIDDEN
    );
    let review = |verb: &str| json!({"spec": {"resourceAttributes": {"verb": verb, "resource": "configmaps", "namespace": "default"}}});
    let reviews = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews";
    for (verb, allowed) in [("list", true), ("delete", false)] {
        let (code, answer) = call_as(&server, "ann", "POST", reviews, review(verb)).await;
        assert_eq!((code, &answer["status"]["allowed"]), (StatusCode::CREATED, &json!(allowed)), "{answer}");
    }
    server.call("DELETE", &format!("{RBAC}/rolebindings/ann"), Value::Null).await;
    assert_eq!(call_as(&server, "ann", "GET", maps, Value::Null).await.0, StatusCode::FORBIDDEN);
}

/// `kubectl get secret a --watch` sends such requests.
#[tokio::test]
async fn a_role_for_named_objects_allows_lists_that_select_one_of_them() {
    const MAPS: &str = "/api/v1/namespaces/default/configmaps";
    let server = Fixture::new().await;
    let rules = json!([{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": ["a"],
        "verbs": ["list", "watch"]}]);
    bind(&server, "ada", rules).await;
    for name in ["a", "b"] {
        let map = config_map(name, json!({}));
        assert_eq!(server.call("POST", MAPS, map).await.0, StatusCode::CREATED);
    }
    for (query, expected) in [
        ("?fieldSelector=metadata.name%3Da", StatusCode::OK),
        ("?fieldSelector=metadata.namespace%3Ddefault,metadata.name%3D%3Da", StatusCode::OK),
        ("", StatusCode::FORBIDDEN),
        ("?fieldSelector=metadata.name%3Db", StatusCode::FORBIDDEN),
        ("?fieldSelector=metadata.name!%3Da", StatusCode::FORBIDDEN),
        ("?fieldSelector=metadata.name%3Da%5C,b", StatusCode::FORBIDDEN),
        ("?fieldSelector=metadata.name%3Da&fieldSelector=metadata.name%3Db", StatusCode::FORBIDDEN),
        ("?fieldSelector=metadata.name%3Da&fieldSelector=", StatusCode::FORBIDDEN),
    ] {
        let (code, list) = call_as(&server, "ada", "GET", &format!("{MAPS}{query}"), Value::Null).await;
        assert_eq!(code, expected, "{query}: {list}");
        if code == StatusCode::OK {
            assert_eq!(list["items"].as_array().unwrap().len(), 1, "{query}: {list}");
        }
    }
}

#[tokio::test]
async fn nobody_grants_what_they_do_not_hold() {
    let server = Fixture::new().await;
    let rules = json!([{"apiGroups": ["rbac.authorization.k8s.io"], "resources": ["*"], "verbs": ["create", "update"]},
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]);
    bind(&server, "bob", rules).await;
    let role = |verb: &str| json!({"metadata": {"name": verb}, "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": [verb]}]});
    let roles = format!("{RBAC}/roles");
    assert_eq!(call_as(&server, "bob", "POST", &roles, role("get")).await.0, StatusCode::CREATED);
    let (code, refused) = call_as(&server, "bob", "POST", &roles, role("delete")).await;
    assert_eq!(code, StatusCode::FORBIDDEN);
    let message = refused["message"].as_str().unwrap();
    assert!(message.contains("is attempting to grant RBAC permissions not currently held"), "{message}");
    let binding = json!({"metadata": {"name": "up"}, "subjects": [{"kind": "User", "name": "bob"}],
        "roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}});
    let bindings = format!("{RBAC}/rolebindings");
    assert_eq!(call_as(&server, "bob", "POST", &bindings, binding).await.0, StatusCode::FORBIDDEN);
    // Nor may they impersonate another user.
    let twice = request("GET", "/api").header("impersonate-user", "bob");
    assert_eq!(server.send(twice.body(Body::empty()).unwrap()).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn tokens_of_service_accounts_live_as_long_as_their_account() {
    let server = Fixture::new().await;
    let accounts = "/api/v1/namespaces/default/serviceaccounts";
    server.call("POST", accounts, json!({"metadata": {"name": "robot"}})).await;
    let path = format!("{accounts}/robot/token");
    let (code, made) = server.call("POST", &path, json!({"spec": {"expirationSeconds": 600}})).await;
    assert_eq!(code, StatusCode::CREATED, "{made}");
    let token = made["status"]["token"].as_str().unwrap().to_owned();
    let whoami = || {
        let review = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
        Request::post(review)
            .header("authorization", format!("Bearer {token}"))
            .header("content-type", "application/json")
            .body(Body::from("{}"))
            .unwrap()
    };
    let (code, me) = json_of(server.send(whoami()).await).await;
    assert_eq!(code, StatusCode::CREATED, "{me}");
    assert_eq!(me["status"]["userInfo"]["username"], "system:serviceaccount:default:robot");
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let (_, found) = server.call("POST", reviews, json!({"spec": {"token": token}})).await;
    assert_eq!(found["status"]["authenticated"], true, "{found}");
    let (_, found) =
        server.call("POST", reviews, json!({"spec": {"token": token, "audiences": ["other"]}})).await;
    assert_ne!(found["status"]["authenticated"], true, "{found}");
    let short = server.call("POST", &path, json!({"spec": {"expirationSeconds": 5}})).await;
    assert_eq!(short.0, StatusCode::UNPROCESSABLE_ENTITY);
    server.call("DELETE", &format!("{accounts}/robot"), Value::Null).await;
    assert_eq!(server.send(whoami()).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_quota_is_not_exceeded_by_two_at_once() {
    let server = Fixture::new().await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"configmaps": "3"}}});
    server.call("POST", "/api/v1/namespaces/default/resourcequotas", quota).await;
    let maps = "/api/v1/namespaces/default/configmaps";
    let calls = (0..8).map(|at| server.call("POST", maps, json!({"metadata": {"name": format!("m{at}")}})));
    let answers = futures::future::join_all(calls).await;
    let created = answers.iter().filter(|(code, _)| *code == StatusCode::CREATED).count();
    assert_eq!(created, 3);
    let refused = answers.iter().find(|(code, _)| *code == StatusCode::FORBIDDEN).unwrap();
    let message = refused.1["message"].as_str().unwrap();
    assert!(
        message.ends_with("requested: configmaps=1, used: configmaps=3, limited: configmaps=3"),
        "{message}"
    );
}
