//! Joins at a small TLS server that signs requests.

mod server;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration};

use http::Request;
use jiff::{SignedDuration, Timestamp};
use mayfly_join::{CaHash, JoinConfig, JoinError, JoinToken, join, renew, rotating_client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use server::{SigningMode, TestServer};

const BOOTSTRAP: &str = "system:bootstrap";
const NODE: &str = "system:node:n1";

fn config(server: &TestServer, folder: &Path) -> JoinConfig {
    let mut config = JoinConfig::new(&server.url, "n1", folder.join("credentials"));
    config.token = Some(server.token.clone());
    config.addresses = vec!["10.1.2.3".parse().unwrap(), "fd00::3".parse().unwrap()];
    config.certificate_wait = Duration::from_secs(60);
    config
}

/// Sets the clock to a time after now.
fn later(config: &JoinConfig, minutes: i64) -> JoinConfig {
    let now = Timestamp::now() + SignedDuration::from_mins(minutes);
    JoinConfig { clock: Arc::new(move || now), ..config.clone() }
}

fn without_token(config: &JoinConfig) -> JoinConfig {
    JoinConfig { token: None, ..config.clone() }
}

async fn user(client: &kube::Client) -> String {
    client.request_text(Request::get("/user").body(Vec::new()).unwrap()).await.unwrap()
}

#[tokio::test]
async fn a_machine_joins_and_starts_again_without_server_and_token() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    let first = join(&config).await.unwrap();
    assert_eq!(server.users(), [BOOTSTRAP, NODE]);
    let user = user(&first.client().unwrap()).await;
    assert!(user.starts_with("O=system:nodes, CN=system:node:n1 "), "{user}");
    assert_eq!(CaHash::of_pem(first.ca_pem()), Some(server.token.ca_hash()));
    assert!(first.expires_at() > Timestamp::now());
    let mut names: Vec<_> = fs::read_dir(&config.folder).unwrap().map(|entry| entry.unwrap()).collect();
    names.sort_by_key(fs::DirEntry::file_name);
    for entry in &names {
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{entry:?}");
    }
    let names: Vec<_> = names.iter().map(|entry| entry.file_name().into_string().unwrap()).collect();
    assert_eq!(names, ["ca.crt", "client.crt", "client.key", "serving.crt", "serving.key"]);
    // A restart with the server does not contact it; nor does one without.
    join(&config).await.unwrap();
    assert_eq!(server.users().len(), 2);
    server.stop().await;
    let again = join(&without_token(&config)).await.unwrap();
    assert_eq!(again.client_certificate_pem(), first.client_certificate_pem());
    assert_eq!(again.serving_key_pem(), first.serving_key_pem());
    // Other names are other certificates.
    let other = JoinConfig { node_name: "n2".into(), ..without_token(&config) };
    let error = join(&other).await.unwrap_err();
    assert!(matches!(error, JoinError::TokenNeeded { .. }), "{error}");
    assert!(error.to_string().contains("system:node:n1"), "{error}");
}

#[tokio::test]
async fn the_token_is_not_sent_to_another_server() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let mut config = config(&server, folder.path());
    config.token = Some(JoinToken::generate(CaHash::of_der(b"another CA"), &mut rand::rng()));
    let error = join(&config).await.unwrap_err();
    let JoinError::WrongAuthority { offered, .. } = &error else { panic!("{error}") };
    assert!(offered.contains(&server.token.ca_hash()) && !error.is_transient());
    assert!(server.state.lock().tokens.is_empty());
    assert!(!config.folder.join("ca.crt").exists());
}

#[tokio::test]
async fn a_token_that_the_server_does_not_know_is_refused() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let mut config = config(&server, folder.path());
    config.token = Some(JoinToken::generate(server.token.ca_hash(), &mut rand::rng()));
    let error = join(&config).await.unwrap_err();
    assert!(matches!(error, JoinError::TokenRefused { .. }), "{error}");
    assert!(server.users().is_empty());
    let error = join(&without_token(&config)).await.unwrap_err();
    assert!(matches!(error, JoinError::TokenNeeded { .. }), "{error}");
}

#[tokio::test]
async fn a_server_that_does_not_answer_is_unreachable() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    server.stop().await;
    let error = join(&config).await.unwrap_err();
    assert!(matches!(error, JoinError::Unreachable { .. }) && error.is_transient(), "{error}");
}

#[tokio::test]
async fn after_a_denial_the_next_join_makes_another_request() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    server.state.lock().decision = SigningMode::Deny;
    let error = join(&config).await.unwrap_err();
    assert!(matches!(&error, JoinError::Denied { message, .. } if message == "test: Denied"), "{error}");
    server.state.lock().decision = SigningMode::Fail;
    let error = join(&config).await.unwrap_err();
    assert!(matches!(&error, JoinError::Failed { message, .. } if message == "test: Failed"), "{error}");
    server.state.lock().decision = SigningMode::Sign;
    join(&config).await.unwrap();
    assert_eq!(server.users(), [BOOTSTRAP, BOOTSTRAP, BOOTSTRAP, NODE]);
}

#[tokio::test]
async fn an_interrupted_join_continues_with_its_request() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    server.state.lock().decision = SigningMode::Wait;
    let impatient = JoinConfig { certificate_wait: Duration::from_secs(2), ..config.clone() };
    let error = join(&impatient).await.unwrap_err();
    let JoinError::NotSigned { message, .. } = &error else { panic!("{error}") };
    assert_eq!(message, "test: NodeNameInUse");
    assert!(error.is_transient());
    server.state.lock().decision = SigningMode::Sign;
    join(&config).await.unwrap();
    assert_eq!(server.users(), [BOOTSTRAP, NODE], "one request of each certificate");
}

#[tokio::test]
async fn an_expired_certificate_needs_a_token() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    let first = join(&config).await.unwrap();
    let expired = later(&config, 120);
    let error = join(&without_token(&expired)).await.unwrap_err();
    assert!(matches!(error, JoinError::TokenNeeded { .. }), "{error}");
    assert!(error.to_string().contains("certificate expired at"), "{error}");
    server.state.lock().validity_s = 86_400;
    let second = join(&expired).await.unwrap();
    assert_ne!(first.client_certificate_pem(), second.client_certificate_pem());
    assert_eq!(server.users(), [BOOTSTRAP, NODE, BOOTSTRAP, NODE]);
}

#[tokio::test]
async fn a_certificate_that_expires_soon_is_replaced_if_the_server_signs() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    let first = join(&config).await.unwrap();
    let mut soon = without_token(&later(&config, 55));
    server.state.lock().decision = SigningMode::Wait;
    soon.certificate_wait = Duration::from_secs(1);
    let kept = join(&soon).await.unwrap();
    assert_eq!(kept.client_certificate_pem(), first.client_certificate_pem());
    server.sign_for(86_400);
    let renewed = join(&soon).await.unwrap();
    assert_ne!(renewed.client_certificate_pem(), first.client_certificate_pem());
    assert_ne!(renewed.serving_certificate_pem(), first.serving_certificate_pem());
    assert_eq!(server.users(), [BOOTSTRAP, NODE, NODE, NODE], "by the node itself, one request each");
}

#[tokio::test]
async fn other_addresses_are_another_serving_certificate() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    let first = join(&config).await.unwrap();
    let moved = JoinConfig { addresses: vec!["10.9.9.9".parse().unwrap()], ..without_token(&config) };
    let second = join(&moved).await.unwrap();
    assert_eq!(second.client_certificate_pem(), first.client_certificate_pem());
    assert_ne!(second.serving_certificate_pem(), first.serving_certificate_pem());
}

#[tokio::test]
async fn a_token_of_another_cluster_replaces_the_credentials() {
    let (one, two) = (TestServer::start().await, TestServer::start().await);
    let folder = tempfile::tempdir().unwrap();
    join(&config(&one, folder.path())).await.unwrap();
    let second = join(&config(&two, folder.path())).await.unwrap();
    assert_eq!(CaHash::of_pem(second.ca_pem()), Some(two.token.ca_hash()));
    assert!(user(&second.client().unwrap()).await.contains(NODE));
}

#[tokio::test]
async fn a_running_node_continues_with_renewed_certificates() {
    let (server, folder) = (TestServer::start().await, tempfile::tempdir().unwrap());
    let config = config(&server, folder.path());
    let first = join(&config).await.unwrap();
    let (sender, mut receiver) = watch::channel(first.clone());
    let client = rotating_client(receiver.clone()).unwrap();
    let before = user(&client).await;
    assert_eq!(before, user(&client).await);
    server.state.lock().validity_s = 86_400;
    let stop = CancellationToken::new();
    let task = tokio::spawn(renew(without_token(&later(&config, 50)), sender, stop.clone()));
    let renewed =
        receiver.wait_for(|new| new.serving_key_pem() != first.serving_key_pem()).await.unwrap().clone();
    let after = user(&client).await;
    assert!(after.contains(NODE) && after != before, "{before} {after}");
    assert_eq!(after, user(&renewed.client().unwrap()).await);
    // The next start has the same.
    let stored = join(&without_token(&config)).await.unwrap();
    assert_eq!(stored.client_certificate_pem(), renewed.client_certificate_pem());
    stop.cancel();
    task.await.unwrap();
}
