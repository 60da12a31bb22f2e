//! Traffic between revisions.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use mayfly_e2e::{Up, full, guest_or_skip, is_ready};
use serde_json::{Value, json};

/// A server with two revisions of greet, which say "Hello" and "Good day", with the given split.
async fn two_revisions(extra: Value) -> Result<Up> {
    let up = Up::start().await?;
    let component = up.upload("greet").await?;
    up.apply_function("greet", &component, json!({})).await?;
    let mut spec = json!({"env": [{"name": "GREETING", "value": "Good day"}]});
    spec.as_object_mut()
        .into_iter()
        .for_each(|spec| spec.extend(extra.as_object().cloned().unwrap_or_default()));
    up.apply_function("greet", &component, spec).await?;
    let both =
        |function: &Value| is_ready(function) && function["status"]["latestReadyRevision"] == "greet-00002";
    up.wait_until_function("greet", "has its second revision ready", both).await?;
    Ok(up)
}

const OLD: &str = "Hello, Ada!";
const NEW: &str = "Good day, Ada!";

/// The response of one call of greet.
async fn said(up: &Up, path: &str, headers: &[(&str, &str)]) -> Result<String> {
    let http = up.http();
    let request = http.request(http::Method::POST, path);
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let answer = http.call(request, full(r#"{"name":"Ada"}"#)).await?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(answer.json()?["message"].as_str().unwrap_or_default().to_owned())
}

/// The number of calls for each response.
async fn count(up: &Up, calls: usize, headers: &[(&str, &str)]) -> Result<BTreeMap<String, usize>> {
    let mut counts = BTreeMap::new();
    for _ in 0..calls {
        *counts.entry(said(up, "/fn/default/greet/", headers).await?).or_default() += 1;
    }
    Ok(counts)
}

fn shares() -> Value {
    json!([
        {"revision": "greet-00001", "percent": 75, "tag": "old"},
        {"latest": true, "percent": 25, "tag": "new"},
    ])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_split_gives_each_revision_its_share() -> Result<()> {
    guest_or_skip!("greet");
    let up = two_revisions(json!({"traffic": shares()})).await?;
    let counts = count(&up, 400, &[]).await?;
    let newer = counts.get(NEW).copied().unwrap_or(0);
    // 100 are expected; six standard deviations are 52.
    ensure!((48..=152).contains(&newer) && counts.len() == 2, "{counts:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tag_leads_to_its_revision_by_header_and_by_host() -> Result<()> {
    guest_or_skip!("greet");
    let up = two_revisions(json!({"traffic": shares()})).await?;
    let old = count(&up, 10, &[("mayfly-tag", "old")]).await?;
    assert_eq!(old.into_iter().collect::<Vec<_>>(), [(OLD.to_owned(), 10)]);
    assert_eq!(said(&up, "/", &[("host", "new-greet.default.fn.localhost")]).await?, NEW);
    let http = up.http();
    let unknown = http.request(http::Method::POST, "/fn/default/greet/").header("mayfly-tag", "purple");
    let answer = http.call(unknown, full("{}")).await?;
    ensure!(answer.status == 404 && answer.text().contains("purple"), "{answer:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_stays_with_its_revision_by_header() -> Result<()> {
    guest_or_skip!("greet");
    let even = json!([{"revision": "greet-00001", "percent": 50}, {"latest": true, "percent": 50}]);
    let up = two_revisions(json!({"traffic": even, "sticky": {"header": "x-user"}})).await?;
    let mut seen = BTreeMap::new();
    for user in 0..24 {
        let counts = count(&up, 6, &[("x-user", &format!("user-{user}"))]).await?;
        ensure!(counts.len() == 1, "user-{user} met both: {counts:?}");
        seen.extend(counts);
    }
    ensure!(seen.len() == 2, "24 users of an even split all met one revision: {seen:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn without_traffic_the_latest_revision_answers() -> Result<()> {
    guest_or_skip!("greet");
    let up = two_revisions(json!({})).await?;
    let counts = count(&up, 20, &[]).await?;
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), [(NEW.to_owned(), 20)]);
    Ok(())
}
