use std::{collections::HashMap, time::Duration};

use mayfly_api::{RevisionSpec, function::Sticky};
use proptest::prelude::*;

use super::*;
use crate::target::Upstream;

fn target(name: &str) -> Arc<RevisionTarget> {
    let upstream = Arc::new(Upstream::Unavailable(Refusal::no_route()));
    let key = ObjectKey::new("ns", name);
    Arc::new(RevisionTarget::new(name.into(), key, &RevisionSpec::default(), upstream, 10))
}

fn end(name: &str, percent: u32, tag: Option<&str>) -> RouteTarget {
    RouteTarget { to: Ok(target(name)), identity: name.into(), percent, tag: tag.map(str::to_owned) }
}

fn route(shares: &[u32], sticky: Option<Sticky>) -> FunctionRoute {
    let ends = shares.iter().enumerate().map(|(at, share)| end(&format!("r{at}"), *share, None)).collect();
    FunctionRoute::new(ObjectKey::new("ns", "hello"), ends, sticky.as_ref())
}

fn chosen(route: &FunctionRoute, headers: &HeaderMap) -> (String, Option<String>) {
    let choice = route.choose(headers, None, false).unwrap();
    let cookie = choice.set_cookie.and_then(|cookie| cookie.beside(&HeaderMap::new()));
    let cookie = cookie.map(|cookie| cookie.to_str().unwrap().to_owned());
    (choice.target.key.name.clone(), cookie)
}

fn headers(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
}

fn shares() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(1u32..=100, 1..8).prop_map(|weights| {
        let total: u32 = weights.iter().sum();
        let mut shares: Vec<_> = weights.iter().map(|weight| weight * 100 / total).collect();
        shares[0] += 100 - shares.iter().sum::<u32>();
        shares
    })
}

proptest! {
    /// Over all numbers, each target gets exactly its share.
    #[test]
    fn shares_are_exact(shares in shares()) {
        let ends: Vec<_> =
            shares.iter().enumerate().map(|(at, share)| end(&format!("r{at}"), *share, None)).collect();
        let Split::Shares(weighted) = Split::of(&ends) else { return Ok(()) };
        let mut counts: HashMap<usize, u32> = HashMap::new();
        for hundredth in 0..100_u64 {
            let number = u32::try_from(((hundredth << 32) + (1 << 31)) / 100).unwrap();
            *counts.entry(by_number(&weighted, number)).or_default() += 1;
        }
        for (at, share) in shares.iter().enumerate() {
            prop_assert_eq!(counts.get(&at).copied().unwrap_or(0), *share);
        }
        prop_assert!(ends[by_number(&weighted, 0)].percent > 0 && ends[by_number(&weighted, u32::MAX)].percent > 0);
    }
}

/// A client that repeats its requests in a fixed order reaches both revisions with each of them.
#[test]
fn shares_do_not_resonate_with_a_clients_order() {
    let route = route(&[50, 50], None);
    for period in 2..8 {
        let mut counts = vec![0; period];
        for request in 0..200 * period {
            counts[request % period] += u32::from(chosen(&route, &HeaderMap::new()).0 == "r1");
        }
        // Of 200 each: 100 ± 7 σ.
        assert!(counts.iter().all(|count| (50..=150).contains(count)), "{period}: {counts:?}");
    }
}

#[test]
fn sticky_header_keeps_and_shares() {
    let sticky = || Some(Sticky { header: Some("x-user".into()), cookie: None });
    let before = route(&[90, 10], sticky());
    let after = route(&[80, 20], sticky());
    let (mut second, mut moved) = (0, 0);
    for user in 0..10_000 {
        let headers = headers("x-user", &format!("user-{user}"));
        let (name, _) = chosen(&before, &headers);
        assert_eq!(chosen(&before, &headers).0, name);
        second += u32::from(name == "r1");
        let (later, _) = chosen(&after, &headers);
        moved += u32::from(later != name);
        assert!(!(name == "r1" && later == "r0"), "the share grew, nobody leaves it");
    }
    assert!((900..1100).contains(&second), "{second}");
    assert!((900..1100).contains(&moved), "{moved}");
}

#[test]
fn sticky_cookie_is_set_and_followed() {
    let route = route(&[50, 50, 0], Some(Sticky { header: None, cookie: Some("rev".into()) }));
    let (name, cookie) = chosen(&route, &HeaderMap::new());
    let expected = format!("rev={name}; Path=/fn/ns/hello; HttpOnly; SameSite=Lax");
    assert_eq!(cookie.as_deref(), Some(expected.as_str()));
    let headers_back = headers("cookie", &format!("a=b; rev={name}; c=d"));
    for _ in 0..10 {
        assert_eq!(chosen(&route, &headers_back), (name.clone(), None));
    }
    // A cookie with a removed target, or a target without a share, is replaced.
    for stale in ["rev=hello-00007", "rev=latest", "rev=r2", "rev=", "other=r0"] {
        assert!(chosen(&route, &headers("cookie", stale)).1.is_some(), "{stale}");
    }
    let by_host = route.choose(&HeaderMap::new(), None, true).unwrap();
    let cookie = by_host.set_cookie.unwrap().beside(&HeaderMap::new()).unwrap();
    assert!(cookie.to_str().unwrap().contains("Path=/;"));
}

/// A session cookie of the application: every value keeps its visitor, and the shares hold.
#[test]
fn the_applications_own_cookie_keeps_and_shares() {
    let sticky = || Some(Sticky { header: None, cookie: Some("session".into()) });
    let (before, after) = (route(&[90, 10, 0], sticky()), route(&[80, 20, 0], sticky()));
    let (mut second, mut moved) = (0, 0);
    for visitor in 0..10_000 {
        let headers = headers("cookie", &format!("a=b; session=hello-visitor-{visitor}"));
        let (name, cookie) = chosen(&before, &headers);
        assert_eq!(cookie, None, "the application's cookie is not overwritten");
        assert_eq!(chosen(&before, &headers).0, name);
        second += u32::from(name == "r1");
        moved += u32::from(chosen(&after, &headers).0 != name);
    }
    assert!((900..1100).contains(&second), "{second}");
    assert!((900..1100).contains(&moved), "{moved}");
}

/// The function sets the chosen cookie itself: a second cookie leads its visitor back to the same revision.
#[test]
fn a_second_cookie_leads_back() {
    let route = route(&[50, 50], Some(Sticky { header: None, cookie: Some("session".into()) }));
    for visitor in 0..100 {
        let first = route.choose(&HeaderMap::new(), None, false).unwrap();
        let own = format!("session=visitor-{visitor}");
        let answer = headers("set-cookie", &own);
        let set = first.set_cookie.unwrap().beside(&answer).unwrap();
        let (second, _) = set.to_str().unwrap().split_once(';').unwrap();
        let back = headers("cookie", &format!("{own}; {second}"));
        assert_eq!(chosen(&route, &back), (first.target.key.name.clone(), None));
    }
    // A cookie with an unknown target is ignored.
    let stale = headers("cookie", "session=visitor-1; mayfly-revision=gone");
    let by_value = headers("cookie", "session=visitor-1");
    assert_eq!(chosen(&route, &stale), chosen(&route, &by_value));
}

#[test]
fn tags_reach_their_target() {
    let ends = vec![end("r0", 100, None), end("r1", 0, Some("canary"))];
    let route = FunctionRoute::new(ObjectKey::new("ns", "hello"), ends, None);
    let name = |choice: Result<RouteChoice<'_>, Refusal>| choice.map(|choice| choice.target.key.name.clone());
    assert_eq!(name(route.choose(&HeaderMap::new(), None, false)), Ok("r0".into()));
    assert_eq!(name(route.choose(&HeaderMap::new(), Some("canary"), true)), Ok("r1".into()));
    assert_eq!(name(route.choose(&headers("mayfly-tag", "canary"), None, false)), Ok("r1".into()));
    let refusal = name(route.choose(&headers("mayfly-tag", "blue"), None, false)).unwrap_err();
    assert_eq!(refusal.code, crate::RefusalCode::NotFound);
    assert!(refusal.hint.contains("canary"), "{}", refusal.hint);
    assert!(target("x").timeout > Duration::ZERO);
}
