//! Checks the families and addresses that a Service requests (upstream's `ValidateServiceClusterIPsRelatedFields`).

use std::net::IpAddr;

use mayfly_api::validation::FieldError;
use serde_json::Value;

use super::{HEADLESS, texts};
use crate::{object::Object, registry::rules, services::network::IpFamily};

const POLICIES: [&str; 3] = ["PreferDualStack", "RequireDualStack", "SingleStack"];

/// A list as upstream prints it.
pub(super) fn shown(list: &[String]) -> String {
    let all: Vec<_> = list.iter().map(|text| format!("{text:?}")).collect();
    format!("[]string{{{}}}", all.join(", "))
}

/// The errors of the request itself, before anything is filled in.
pub(super) fn check(new: &Object) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let ip = new.str_at(&["spec", "clusterIP"]);
    let ips: Vec<_> = texts(new, "clusterIPs").map(str::to_owned).collect();
    let mut refuse = |detail: &str| errors.push(FieldError::invalid("spec.clusterIPs", shown(&ips), detail));
    match ips.first() {
        Some(first) if !ip.is_empty() && first != ip => refuse("first value must match `clusterIP`"),
        Some(_) if ip.is_empty() => refuse("must be empty when `clusterIP` is not specified"),
        _ => {}
    }
    if ips.first().is_some_and(|ip| ip == HEADLESS) && ips.len() > 1 {
        refuse("'None' must be the first and only value");
    }
    if ips.len() > 2 {
        refuse("may only hold up to 2 values");
    }
    let parsed: Vec<Option<IpAddr>> = ips.iter().map(|ip| ip.parse().ok()).collect();
    if let [Some(first), Some(second)] = *parsed
        && first.is_ipv4() == second.is_ipv4()
    {
        refuse("may specify no more than one IP for each IP family");
    }
    let families: Vec<_> = texts(new, "ipFamilies").collect();
    for (at, name) in families.iter().enumerate() {
        let path = format!("spec.ipFamilies[{at}]");
        let Some(family) = IpFamily::parse(name) else {
            errors.push(rules::not_supported(path, name, &["IPv4", "IPv6"]));
            continue;
        };
        if families[..at].contains(name) {
            errors.push(rules::duplicate(path, format!("{name:?}")));
        }
        if let Some(Some(ip)) = parsed.get(at)
            && IpFamily::of(*ip) != family
        {
            let detail = format!("expected an {name} value as indicated by `ipFamilies[{at}]`");
            errors.push(FieldError::invalid(
                format!("spec.clusterIPs[{at}]"),
                format!("{:?}", ip.to_string()),
                detail,
            ));
        }
    }
    if let Some(policy) = new.at(&["spec", "ipFamilyPolicy"]).and_then(Value::as_str)
        && !policy.is_empty()
        && !POLICIES.contains(&policy)
    {
        errors.push(rules::not_supported("spec.ipFamilyPolicy", policy, &POLICIES));
    }
    errors
}
