//! Converts `allowed_outbound_hosts` to the rules of `spec.egress`.

use mayfly_api::egress::EgressRule;

/// The rules for one allowed host, or the reason why it cannot be converted.
pub(crate) fn rules(allowed: &str) -> Result<Vec<String>, String> {
    let Some((scheme, authority)) = allowed.split_once("://") else {
        return Err("it has no scheme: write https://host".to_owned());
    };
    let schemes: &[&str] = match scheme {
        "http" => &["http"],
        "https" => &["https"],
        "*" => &["http", "https"],
        _ => return Err(format!("functions call out by HTTP only, not by {scheme}")),
    };
    let authority = authority.strip_suffix('/').unwrap_or(authority);
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, Some(port)),
        _ => (authority, None),
    };
    if host == "self" || host == "self.alt" || host.ends_with(".spin.internal") {
        return Err(
            "components do not call each other by Spin's internal names: a private component has a Service, \
                    http://FUNCTION.NAMESPACE.svc.cluster.local"
                .to_owned(),
        );
    }
    if host == "*" {
        return Err("egress names the hosts: list them, or whole domains as *.example.com".to_owned());
    }
    if host.contains('/') {
        return Err("egress names addresses, not networks".to_owned());
    }
    match port {
        Some("*") => {
            return Err("egress names the ports: write one, or leave it out for the scheme's own".to_owned());
        }
        Some(port) if port.contains("..") => {
            return Err("egress names the ports: write an entry for each".to_owned());
        }
        _ => {}
    }
    let rule = |scheme: &&str| {
        let rule = format!("{scheme}://{authority}");
        rule.parse::<EgressRule>().map(|_| rule).map_err(|error| error.to_string())
    };
    schemes.iter().map(rule).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_become_rules_or_are_refused_with_the_reason() {
        for (allowed, expected) in [
            ("https://api.example.com", &["https://api.example.com"][..]),
            ("https://api.example.com:8443/", &["https://api.example.com:8443"]),
            ("https://*.example.com", &["https://*.example.com"]),
            ("http://127.0.0.1:8080", &["http://127.0.0.1:8080"]),
            ("http://[::1]:8080", &["http://[::1]:8080"]),
            ("*://example.com", &["http://example.com", "https://example.com"]),
            ("*://example.com:81", &["http://example.com:81", "https://example.com:81"]),
        ] {
            assert_eq!(rules(allowed).unwrap(), expected, "{allowed}");
        }
        for (allowed, expected) in [
            ("example.com", "no scheme"),
            ("redis://localhost:6379", "by HTTP only, not by redis"),
            ("https://*:*", "names the hosts"),
            ("*://*:*", "names the hosts"),
            ("http://example.com:*", "names the ports"),
            ("http://example.com:8000..8010", "an entry for each"),
            ("https://10.0.0.0/8", "not networks"),
            ("http://self", "internal names"),
            ("http://cart.spin.internal", "internal names"),
            ("http://a b", "is not an egress rule"),
        ] {
            let why = rules(allowed).unwrap_err();
            assert!(why.contains(expected), "{allowed}: {why}");
        }
    }
}
