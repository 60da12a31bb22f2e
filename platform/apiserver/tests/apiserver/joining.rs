//! Machines that join: bootstrap tokens, certificates of nodes, and the rights of both.

use axum::body::Body;
use http::{Request, Response, StatusCode};
use jiff::{SignedDuration, Timestamp};
use kube::{Api, api::DeleteParams};
use mayfly_apiserver::BootstrapToken;
use serde_json::{Value, json};

use crate::support::{Fixture, json_of};

const REVIEW: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";

async fn post_with(server: &Fixture, token: &str, path: &str, body: Value) -> Response<Body> {
    let request = Request::post(path).header("authorization", format!("Bearer {token}"));
    let request = request.header("content-type", "application/json");
    server.send(request.body(Body::from(body.to_string())).unwrap()).await
}

#[tokio::test]
async fn bootstrap_tokens_authenticate_while_their_secret_exists() {
    let server = Fixture::new().await;
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(server.client(), "kube-system");
    let token = BootstrapToken::generate();
    let text = token.to_string();
    let whoami = || post_with(&server, &text, REVIEW, json!({}));
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "without its Secret");
    let until = Timestamp::now().checked_add(SignedDuration::from_hours(1)).unwrap();
    let secret = token.to_secret("a test", Some(until));
    secrets.create(&Default::default(), &secret).await.unwrap();
    let (code, answer) = json_of(whoami().await).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    let user = &answer["status"]["userInfo"];
    assert_eq!(user["username"], format!("system:bootstrap:{}", token.id()));
    assert_eq!(user["groups"], json!(["system:bootstrappers", "system:authenticated"]));

    // A review of the token, for components that do not read Secrets.
    let path = "/apis/authentication.k8s.io/v1/tokenreviews";
    let (_, answer) = server.call("POST", path, json!({"spec": {"token": text}})).await;
    assert_eq!(answer["status"]["authenticated"], true, "{answer}");
    assert_eq!(answer["status"]["user"]["username"], user["username"]);
    let elsewhere = json!({"spec": {"token": text, "audiences": ["elsewhere"]}});
    let (_, answer) = server.call("POST", path, elsewhere).await;
    assert!(answer["status"]["authenticated"].is_null() && answer["status"]["error"].is_string(), "{answer}");

    // The same Secret in another namespace is no token.
    let name = secret.metadata.name.clone().unwrap();
    secrets.delete(&name, &DeleteParams::default()).await.unwrap();
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "after its Secret was deleted");
    let foreign: Api<k8s_openapi::api::core::v1::Secret> = Api::namespaced(server.client(), "default");
    let mut elsewhere = secret;
    elsewhere.metadata.namespace = Some("default".into());
    foreign.create(&Default::default(), &elsewhere).await.unwrap();
    assert_eq!(whoami().await.status(), StatusCode::UNAUTHORIZED, "in another namespace");
}
