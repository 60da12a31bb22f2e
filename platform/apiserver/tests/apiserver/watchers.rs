//! Watches by the thousand, and a watch whose client does not read.

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::{Fixture, config_map};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

async fn version(server: &Fixture) -> String {
    server.get(MAPS).await.1["metadata"]["resourceVersion"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn ten_thousand_watchers_see_a_write_and_one_more_is_refused() {
    let server = Fixture::with(|config| config.watches_max = 10_000, |_| {}).await;
    let path = format!("{MAPS}?watch=true&resourceVersion={}", version(&server).await);
    let mut watchers = Vec::new();
    for _ in 0..10_000 {
        watchers.push(server.watch(&path).await);
    }
    assert_eq!(server.get(&path).await.0, StatusCode::TOO_MANY_REQUESTS);
    let (code, created) = server.call("POST", MAPS, config_map("seen", json!({}))).await;
    assert_eq!(code, StatusCode::CREATED, "{created}");
    for watcher in &mut watchers {
        assert_eq!(watcher.event().await, ("ADDED".to_owned(), "seen".to_owned()));
    }
    drop(watchers);
    server.watch(&path).await;
}

/// Nothing is kept for such a client: its watch ends once the history has gone past it, and the others go on.
#[tokio::test]
async fn a_client_that_never_reads_loses_its_watch() {
    let server = Fixture::new().await;
    server.call("POST", MAPS, config_map("a", json!({}))).await;
    let path = format!("{MAPS}?watch=true&resourceVersion={}", version(&server).await);
    let mut silent = server.watch(&path).await;
    let one = format!("{MAPS}/a");
    // More than the history keeps of one kind. A patch is attempted 32 times, and each failure is another's success.
    for round in 0..282 {
        let writes = (0..32).map(|n| server.merge(&one, json!({"data": {"n": format!("{round}-{n}")}})));
        let answers = futures::future::join_all(writes).await;
        assert!(answers.iter().all(|(code, _)| *code == StatusCode::OK));
    }
    let mut last = Value::Null;
    let mut count = 0;
    while let Some(line) = silent.next().await {
        (last, count) = (line, count + 1);
    }
    assert_eq!((last["type"].as_str(), &last["object"]["code"]), (Some("ERROR"), &json!(410)), "{last}");
    assert_eq!(last["object"]["reason"], "Expired", "{last}");
    assert!(count < 1000, "{count} events were kept for it");
}
