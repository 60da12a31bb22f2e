//! FlowSchemas and PriorityLevelConfigurations. The rules are upstream's (`pkg/apis/flowcontrol`). They are stored and
//! validated; the limits of requests are those of [`crate::Config`].

use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use mayfly_api::{names, validation::FieldError};
use serde_json::{Value, json};

use super::{
    AGE, Column, Kind, NAME,
    defaulting::{fill, map_in},
    print,
    rules::{duplicate, get, items, one_of, text},
};
use crate::object::Object;

/// Both the level and the schema of requests without limits.
const EXEMPT: &str = "exempt";
const PRECEDENCE_MAX: i64 = 10_000;
const QUEUES_MAX: i64 = 10_000_000;
/// The bits of the hash that deals the hands of queues (upstream's `shufflesharding.MaxHashBits`).
const HASH_BITS: u32 = 60;
const VERBS: [&str; 9] =
    ["create", "delete", "deletecollection", "get", "list", "patch", "proxy", "update", "watch"];

pub(super) fn kinds() -> Vec<Kind> {
    vec![flow_schema(), priority_level()]
}

fn flow_schema() -> Kind {
    Kind {
        columns: const {
            &[
                NAME,
                Column::text(
                    "PriorityLevel",
                    "`name` is the name of the priority level configuration being referenced Required.",
                ),
                Column::text(
                    "MatchingPrecedence",
                    "`matchingPrecedence` is used to choose among the FlowSchemas that match a given request. The chosen FlowSchema is among those with the numerically lowest (which we take to be logically highest) MatchingPrecedence.  Each MatchingPrecedence value must be ranged in [1,10000]. Note that if the precedence is not specified, it will be set to 1000 as default.",
                ),
                Column::text(
                    "DistinguisherMethod",
                    "`distinguisherMethod` defines how to compute the flow distinguisher for requests that match this schema. `nil` specifies that the distinguisher is disabled and thus will always be the empty string.",
                ),
                AGE,
                Column::text("MissingPL", "references a broken or non-existent PriorityLevelConfiguration"),
            ]
        },
        cells: |object, now| {
            vec![
                object.name().into(),
                object.str_at(&["spec", "priorityLevelConfiguration", "name"]).into(),
                print::number(object, &["spec", "matchingPrecedence"]),
                print::or_none(object.str_at(&["spec", "distinguisherMethod", "type"])),
                print::age(object, now),
                print::condition(object, "Dangling").map_or("?", |(status, _)| status).into(),
            ]
        },
        defaults: |object| {
            if let Some(spec) = map_in(&mut object.0, &["spec"]) {
                // Go's zero counts as absent.
                spec.retain(|field, value| field != "matchingPrecedence" || *value != json!(0));
                fill(spec, [("matchingPrecedence", json!(1000))]);
            }
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            flow_spec(new, &mut errors);
            conditions(new, &mut errors);
            errors
        },
        ..base(Kind::built_in::<FlowSchema>("flowschema"))
    }
}

fn priority_level() -> Kind {
    Kind {
        columns: const {
            &[
                NAME,
                Column::text(
                    "Type",
                    "`type` indicates whether this priority level is subject to limitation on request execution.  A value of `\"Exempt\"` means that requests of this priority level are not subject to a limit (and thus are never queued) and do not detract from the capacity made available to other priority levels.  A value of `\"Limited\"` means that (a) requests of this priority level _are_ subject to limits and (b) some of the server's limited capacity is made available exclusively to this priority level. Required.",
                ),
                Column::text(
                    "NominalConcurrencyShares",
                    "The share of the server's concurrency that is nominally reserved for this level.",
                ),
                Column::text("Queues", "`queues` is the number of queues for this priority level."),
                Column::text("HandSize", "`handSize` is the number of queues that a flow is dealt."),
                Column::text(
                    "QueueLengthLimit",
                    "`queueLengthLimit` is the maximum number of requests that wait in one queue.",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let limited = get(object, &["spec", "limited"]);
            let shown = |value: &Value| if value.is_null() { "<none>".into() } else { value.clone() };
            let queuing = &limited["limitResponse"]["queuing"];
            vec![
                object.name().into(),
                object.str_at(&["spec", "type"]).into(),
                shown(&limited["nominalConcurrencyShares"]),
                shown(&queuing["queues"]),
                shown(&queuing["handSize"]),
                shown(&queuing["queueLengthLimit"]),
                print::age(object, now),
            ]
        },
        defaults: |object| {
            let shares =
                |count: i64| [("nominalConcurrencyShares", json!(count)), ("lendablePercent", json!(0))];
            if let Some(exempt) = map_in(&mut object.0, &["spec", "exempt"]) {
                fill(exempt, shares(0));
            }
            if let Some(limited) = map_in(&mut object.0, &["spec", "limited"]) {
                fill(limited, shares(30));
            }
            if let Some(queuing) = map_in(&mut object.0, &["spec", "limited", "limitResponse", "queuing"]) {
                queuing.retain(|_, value| *value != json!(0));
                let defaults =
                    [("queues", json!(64)), ("handSize", json!(8)), ("queueLengthLimit", json!(50))];
                fill(queuing, defaults);
            }
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            level_spec(new, &mut errors);
            conditions(new, &mut errors);
            errors
        },
        ..base(Kind::built_in::<PriorityLevelConfiguration>("prioritylevelconfiguration"))
    }
}

fn base(kind: Kind) -> Kind {
    Kind { namespaced: false, generation: true, ..kind }
}

/// `status.conditions` of both kinds.
fn conditions(new: &Object, errors: &mut Vec<FieldError>) {
    let mut seen = std::collections::HashSet::new();
    for (at, condition) in items(get(new, &["status", "conditions"])) {
        let (path, kind) = (format!("status.conditions[{at}].type"), text(condition, "type"));
        if !seen.insert(kind) {
            errors.push(duplicate(path.clone(), format!("{kind:?}")));
        }
        if kind.is_empty() {
            errors.push(FieldError::required(path, "must not be empty"));
        }
    }
}

fn flow_spec(new: &Object, errors: &mut Vec<FieldError>) {
    let spec = get(new, &["spec"]);
    let precedence = spec["matchingPrecedence"].as_i64().unwrap_or(0);
    let path = "spec.matchingPrecedence";
    if precedence <= 0 {
        errors.push(FieldError::invalid(path, precedence, "must be a positive value"));
    }
    if precedence > PRECEDENCE_MAX {
        let detail = format!("must not be greater than {PRECEDENCE_MAX}");
        errors.push(FieldError::invalid(path, precedence, detail));
    }
    if precedence == 1 && new.name() != EXEMPT {
        let detail = "only the schema named 'exempt' may have matchingPrecedence 1";
        errors.push(FieldError::invalid(path, precedence, detail));
    }
    if let Some(method) = spec["distinguisherMethod"].as_object() {
        let kind = method.get("type").and_then(Value::as_str).unwrap_or("");
        one_of(kind, &["ByNamespace", "ByUser"], "spec.distinguisherMethod.type", errors);
    }
    let (level, path) = (&spec["priorityLevelConfiguration"], "spec.priorityLevelConfiguration.name");
    match text(level, "name") {
        "" => errors.push(FieldError::required(path, "must reference a priority level")),
        name => {
            if let Err(why) = names::dns_subdomain(name) {
                errors.push(FieldError::invalid(path, format!("{name:?}"), why));
            }
        }
    }
    for (at, rule) in items(&spec["rules"]) {
        flow_rule(rule, &format!("spec.rules[{at}]"), errors);
    }
}

fn flow_rule(rule: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let none = |field: &str| rule[field].as_array().is_none_or(Vec::is_empty);
    if none("subjects") {
        let detail = "subjects must contain at least one value";
        errors.push(FieldError::required(format!("{path}.subjects"), detail));
    }
    for (at, subject) in items(&rule["subjects"]) {
        flow_subject(subject, &format!("{path}.subjects[{at}]"), errors);
    }
    if none("resourceRules") && none("nonResourceRules") {
        let detail = "at least one of resourceRules and nonResourceRules has to be non-empty";
        errors.push(FieldError::required(path, detail));
    }
    for (at, rule) in items(&rule["resourceRules"]) {
        let path = format!("{path}.resourceRules[{at}]");
        verbs(rule, &path, errors);
        for (field, what) in [("apiGroups", "api group"), ("resources", "resource")] {
            let detail = format!("resource rules must supply at least one {what}");
            wildcard(rule, field, &path, &detail, &format!("{what}s"), errors);
        }
        namespaces(rule, &path, errors);
    }
    for (at, rule) in items(&rule["nonResourceRules"]) {
        let path = format!("{path}.nonResourceRules[{at}]");
        verbs(rule, &path, errors);
        let (field, what) = ("nonResourceURLs", "non-resource URLs");
        let detail = "nonResourceURLs must contain at least one value";
        if !wildcard(rule, field, &path, detail, what, errors) {
            for (at, url) in items(&rule[field]) {
                if let Some(why) = wrong_url(url.as_str().unwrap_or("")) {
                    errors.push(FieldError::invalid(format!("{path}.{field}[{at}]"), url, why));
                }
            }
        }
    }
}

fn flow_subject(subject: &Value, path: &str, errors: &mut Vec<FieldError>) {
    const KINDS: [(&str, &str); 3] =
        [("Group", "group"), ("ServiceAccount", "serviceAccount"), ("User", "user")];
    let kind = text(subject, "kind");
    let Some((_, own)) = KINDS.iter().find(|(known, _)| *known == kind) else {
        return errors.push(super::not_supported(
            format!("{path}.kind"),
            kind,
            &["Group", "ServiceAccount", "User"],
        ));
    };
    let (given, own_path) = (&subject[*own], format!("{path}.{own}"));
    if given.is_null() {
        errors
            .push(FieldError::required(own_path, format!("{own} is required when subject kind is '{kind}'")));
    } else {
        let name = text(given, "name");
        if name.is_empty() {
            errors.push(FieldError::required(format!("{own_path}.name"), ""));
        } else if kind == "ServiceAccount"
            && name != "*"
            && let Err(why) = names::dns_subdomain(name)
        {
            errors.push(FieldError::invalid(format!("{own_path}.name"), format!("{name:?}"), why));
        }
        if kind == "ServiceAccount" {
            let (namespace, path) = (text(given, "namespace"), format!("{own_path}.namespace"));
            if namespace.is_empty() {
                errors.push(FieldError::required(path, "must specify namespace for service account"));
            } else if let Err(why) = names::dns_label(namespace) {
                errors.push(FieldError::invalid(path, format!("{namespace:?}"), why));
            }
        }
    }
    for (other, field) in KINDS.iter().filter(|(other, field)| *other != kind && !subject[*field].is_null()) {
        let detail = format!("{field} is forbidden when subject kind is not '{other}'");
        errors.push(FieldError::forbidden(format!("{path}.{field}"), detail));
    }
}

fn verbs(rule: &Value, path: &str, errors: &mut Vec<FieldError>) {
    if wildcard(rule, "verbs", path, "verbs must contain at least one value", "verbs", errors) {
        return;
    }
    let unknown = items(&rule["verbs"]).any(|(_, verb)| !VERBS.contains(&verb.as_str().unwrap_or("")));
    if unknown {
        let mut error = super::not_supported(format!("{path}.verbs"), "", &VERBS);
        error.kind =
            mayfly_api::validation::FieldErrorKind::NotSupported { value: rule["verbs"].to_string() };
        errors.push(error);
    }
}

/// A list that has items, and only one if one of them is `*`. Returns whether there is nothing more to check.
fn wildcard(
    rule: &Value,
    field: &str,
    path: &str,
    missing: &str,
    others: &str,
    errors: &mut Vec<FieldError>,
) -> bool {
    let list = rule[field].as_array().map_or(&[][..], Vec::as_slice);
    if list.is_empty() {
        errors.push(FieldError::required(format!("{path}.{field}"), missing));
        return true;
    }
    if !list.iter().any(|item| item == "*") {
        return false;
    }
    if list.len() > 1 {
        let detail = format!("if '*' is present, must not specify other {others}");
        errors.push(FieldError::invalid(format!("{path}.{field}"), &rule[field], detail));
    }
    true
}

fn namespaces(rule: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let none = rule["namespaces"].as_array().is_none_or(Vec::is_empty);
    if none && rule["clusterScope"] == json!(true) {
        return;
    }
    let missing = "resource rules that are not cluster scoped must supply at least one namespace";
    if wildcard(rule, "namespaces", path, missing, "namespaces", errors) {
        return;
    }
    for (at, namespace) in items(&rule["namespaces"]) {
        if let Err(why) = names::dns_label(namespace.as_str().unwrap_or("")) {
            let detail = format!("each member of this list must be '*' or a DNS-1123 label; {why}");
            errors.push(FieldError::invalid(format!("{path}.namespaces[{at}]"), namespace, detail));
        }
    }
}

/// The reason why a path of a rule is none (upstream's `ValidateNonResourceURLPath`).
fn wrong_url(url: &str) -> Option<&'static str> {
    let stars = url.matches('*').count();
    match url {
        "" => Some("must not be empty"),
        "/" => None,
        url if !url.starts_with('/') => Some("must start with slash"),
        url if url.contains(' ') => Some("must not contain white-space"),
        url if url.contains("//") => Some("must not contain double slash"),
        url if stars > 1 || (stars == 1 && !url.ends_with("/*")) => {
            Some("wildcard can only do suffix matching")
        }
        _ => None,
    }
}

fn level_spec(new: &Object, errors: &mut Vec<FieldError>) {
    let spec = get(new, &["spec"]);
    let kind = text(spec, "type");
    if (new.name() == EXEMPT) != (kind == "Exempt") {
        let detail = "type must be 'Exempt' if and only if name is 'exempt'";
        errors.push(FieldError::invalid("spec.type", format!("{kind:?}"), detail));
    }
    let (limited, exempt) = (&spec["limited"], &spec["exempt"]);
    match kind {
        "Exempt" => {
            if !limited.is_null() {
                errors.push(FieldError::forbidden("spec.limited", "must be nil if the type is not Limited"));
            }
            if !exempt.is_null() {
                shares(exempt, "spec.exempt", errors);
            }
        }
        "Limited" => {
            if !exempt.is_null() {
                errors.push(FieldError::forbidden("spec.exempt", "must be nil if the type is Limited"));
            }
            if limited.is_null() {
                errors.push(FieldError::required("spec.limited", "must not be empty when type is Limited"));
            } else {
                limited_level(limited, errors);
            }
        }
        other => one_of(other, &["Exempt", "Limited"], "spec.type", errors),
    }
}

fn shares(part: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let count = part["nominalConcurrencyShares"].as_i64().unwrap_or(0);
    if count < 0 {
        let path = format!("{path}.nominalConcurrencyShares");
        errors.push(FieldError::invalid(path, count, "must be a non-negative integer"));
    }
    let percent = part["lendablePercent"].as_i64().unwrap_or(0);
    if !(0..=100).contains(&percent) {
        let path = format!("{path}.lendablePercent");
        errors.push(FieldError::invalid(path, percent, "must be between 0 and 100, inclusive"));
    }
}

fn limited_level(limited: &Value, errors: &mut Vec<FieldError>) {
    shares(limited, "spec.limited", errors);
    if let Some(percent) = limited["borrowingLimitPercent"].as_i64().filter(|percent| *percent < 0) {
        let detail = "if specified, must be a non-negative integer";
        errors.push(FieldError::invalid("spec.limited.borrowingLimitPercent", percent, detail));
    }
    let (response, path) = (&limited["limitResponse"], "spec.limited.limitResponse");
    let queuing = &response["queuing"];
    match text(response, "type") {
        "Reject" if !queuing.is_null() => errors.push(FieldError::forbidden(
            format!("{path}.queuing"),
            "must be nil if limited.limitResponse.type is not Limited",
        )),
        "Reject" => {}
        "Queue" if queuing.is_null() => errors.push(FieldError::required(
            format!("{path}.queuing"),
            "must not be empty if limited.limitResponse.type is Limited",
        )),
        "Queue" => queues(queuing, &format!("{path}.queuing"), errors),
        other => one_of(other, &["Queue", "Reject"], &format!("{path}.type"), errors),
    }
}

fn queues(queuing: &Value, path: &str, errors: &mut Vec<FieldError>) {
    let number = |field: &str| queuing[field].as_i64().unwrap_or(0);
    let (length, queues, hand) = (number("queueLengthLimit"), number("queues"), number("handSize"));
    if length <= 0 {
        errors.push(FieldError::invalid(format!("{path}.queueLengthLimit"), length, "must be positive"));
    }
    if queues <= 0 {
        errors.push(FieldError::invalid(format!("{path}.queues"), queues, "must be positive"));
    } else if queues > QUEUES_MAX {
        let detail = format!("must not be greater than {QUEUES_MAX}");
        errors.push(FieldError::invalid(format!("{path}.queues"), queues, detail));
    }
    let path = format!("{path}.handSize");
    if hand <= 0 {
        errors.push(FieldError::invalid(path, hand, "must be positive"));
    } else if hand > queues {
        let detail = format!("should not be greater than queues ({queues})");
        errors.push(FieldError::invalid(path, hand, detail));
    } else if entropy_bits(queues, hand) > HASH_BITS {
        let bits = entropy_bits(queues, hand);
        let detail = format!(
            "required entropy bits of deckSize {queues} and handSize {hand} should not be greater than {HASH_BITS}, but is {bits}"
        );
        errors.push(FieldError::invalid(path, hand, detail));
    }
}

/// The bits that choose a hand from a deck (upstream's `RequiredEntropyBits`).
fn entropy_bits(deck: i64, hand: i64) -> u32 {
    let mut bits = 0.0;
    for left in (deck - hand + 1..=deck).take(usize::try_from(HASH_BITS).unwrap_or(0) + 1) {
        #[expect(clippy::cast_precision_loss, reason = "a deck has at most 10^7 queues")]
        let left = left as f64;
        bits += left.log2();
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 61 times 24 bits")]
    let bits = bits.ceil() as u32;
    bits
}
