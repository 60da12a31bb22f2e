//! Requests that are answered and not kept: access reviews, token reviews, and the tokens of service accounts.

use mayfly_api::validation::FieldError;
use serde_json::{Value, json};

use crate::{
    access::User,
    meta,
    object::Object,
    rbac::{AccessDecision, Attributes, PolicyRule},
    registry::{Kind, registry},
    server::ServerState,
    status::ApiError,
    tokens::{
        EXPIRATION_SECONDS_DEFAULT, EXPIRATION_SECONDS_MAX, EXPIRATION_SECONDS_MIN, ISSUER, TokenClaims,
    },
    verbs::{key, load},
};

impl ServerState {
    /// Answers a review of one of the kinds that are [`crate::registry::Backing::Review`].
    pub(crate) fn answer_review(
        &self,
        kind: &Kind,
        mut review: Object,
        user: &User,
        namespace: &str,
    ) -> Result<Object, ApiError> {
        let spec = review.at(&["spec"]).cloned().unwrap_or_default();
        let status = match kind.kind {
            "SelfSubjectReview" => json!({"userInfo": user_info(user)}),
            "TokenReview" => self.review_token(&spec)?,
            "SelfSubjectRulesReview" => self.review_rules(user, spec["namespace"].as_str().unwrap_or("")),
            "SelfSubjectAccessReview" => {
                check_access_spec(kind, &spec, false)?;
                self.review_access(user, &spec)
            }
            _ => {
                check_access_spec(kind, &spec, true)?;
                let asked = spec["resourceAttributes"]["namespace"].as_str().unwrap_or("");
                if kind.namespaced && asked != namespace {
                    let detail = format!("must match metadata.namespace: {namespace}");
                    let error = FieldError::invalid(
                        "spec.resourceAttributes.namespace",
                        format!("{asked:?}"),
                        detail,
                    );
                    return Err(ApiError::invalid(kind, "", &[error]));
                }
                self.review_access(&subject(&spec), &spec)
            }
        };
        review.0.insert("status".into(), status);
        review.meta_mut().insert("creationTimestamp".into(), Value::Null);
        Ok(review)
    }

    fn review_access(&self, user: &User, spec: &Value) -> Value {
        let text = |map: &'static str, field: &str| spec[map][field].as_str().unwrap_or("").to_owned();
        let decision = match spec["nonResourceAttributes"].is_object() {
            true => {
                let (path, verb) =
                    (text("nonResourceAttributes", "path"), text("nonResourceAttributes", "verb"));
                self.authorize(user, &Attributes { verb: &verb, path: Some(&path), ..Attributes::default() })
            }
            false => {
                let of = |field: &str| text("resourceAttributes", field);
                let (verb, group, resource) = (of("verb"), of("group"), of("resource"));
                let (subresource, namespace, name) = (of("subresource"), of("namespace"), of("name"));
                let asked = Attributes {
                    verb: &verb,
                    path: None,
                    group: &group,
                    resource: &resource,
                    subresource: &subresource,
                    namespace: &namespace,
                    name: &name,
                };
                self.authorize(user, &asked)
            }
        };
        match decision {
            AccessDecision::Allowed { reason } if reason.is_empty() => json!({"allowed": true}),
            AccessDecision::Allowed { reason } => json!({"allowed": true, "reason": reason}),
            AccessDecision::Refused { errors } if errors.is_empty() => json!({"allowed": false}),
            AccessDecision::Refused { errors } => {
                json!({"allowed": false, "reason": format!("RBAC: {}", errors.join(", "))})
            }
        }
    }

    fn review_rules(&self, user: &User, namespace: &str) -> Value {
        let all = |mut rules: Vec<PolicyRule>| {
            if user.is_master() {
                let star = || vec!["*".to_owned()];
                rules.insert(
                    0,
                    PolicyRule {
                        verbs: star(),
                        api_groups: star(),
                        resources: star(),
                        ..PolicyRule::default()
                    },
                );
                rules.insert(
                    1,
                    PolicyRule { verbs: star(), non_resource_urls: star(), ..PolicyRule::default() },
                );
            }
            rules
        };
        let rules = all(self.rbac.index(&self.store).rules_for(user, namespace));
        let (paths, resources): (Vec<_>, Vec<_>) =
            rules.into_iter().partition(|rule| !rule.non_resource_urls.is_empty());
        let resources: Vec<_> = resources
            .into_iter()
            .map(|rule| {
                let mut value =
                    json!({"verbs": rule.verbs, "apiGroups": rule.api_groups, "resources": rule.resources});
                if !rule.resource_names.is_empty() {
                    value["resourceNames"] = rule.resource_names.into();
                }
                value
            })
            .collect();
        let paths: Vec<_> = paths
            .into_iter()
            .map(|rule| json!({"verbs": rule.verbs, "nonResourceURLs": rule.non_resource_urls}))
            .collect();
        json!({"resourceRules": resources, "nonResourceRules": paths, "incomplete": false})
    }

    fn review_token(&self, spec: &Value) -> Result<Value, ApiError> {
        let token = spec["token"].as_str().unwrap_or("");
        if token.is_empty() {
            return Err(ApiError::bad_request("token is required for TokenReview in authentication"));
        }
        let audiences = texts(&spec["audiences"]);
        let is_for_api = audiences.is_empty() || audiences.iter().any(|audience| audience == ISSUER);
        if let Some(user) = self.bootstrap_user(token).filter(|_| is_for_api) {
            return Ok(json!({"authenticated": true, "user": user_info(&user), "audiences": [ISSUER]}));
        }
        Ok(match self.tokens.verify(self, token, &audiences) {
            Ok(found) => {
                json!({"authenticated": true, "user": user_info(&found.user), "audiences": found.audiences})
            }
            Err(error) => json!({"user": {}, "error": format!("[invalid bearer token, {error}]")}),
        })
    }

    /// `serviceaccounts/x/token`: makes a token.
    pub(crate) fn create_token(
        &self,
        namespace: &str,
        name: &str,
        mut request: Object,
        dry_run: bool,
    ) -> Result<Object, ApiError> {
        let accounts = registry().find("", "v1", "serviceaccounts").ok_or_else(ApiError::no_resource)?;
        let entry = load(&self.store, accounts, &key(accounts, namespace, name))?;
        let account = Object::from_entry(&entry).map_err(ApiError::internal)?;
        let spec = request.at(&["spec"]).cloned().unwrap_or_default();
        let seconds = spec["expirationSeconds"].as_i64().unwrap_or(EXPIRATION_SECONDS_DEFAULT);
        check_token_spec(seconds)?;
        let mut audiences = texts(&spec["audiences"]);
        if audiences.is_empty() {
            audiences.push(ISSUER.to_owned());
        }
        let bound = self.bound_object(namespace, &spec["boundObjectRef"])?;
        let claims = TokenClaims {
            namespace,
            account: name,
            account_uid: account.uid(),
            bound: bound.as_ref().map(|(kind, name, uid)| (kind.as_str(), name.as_str(), uid.as_str())),
            audiences: &audiences,
            seconds,
        };
        let now = self.now();
        let token = if dry_run { String::new() } else { self.tokens.sign(&claims, now) };
        let until = now.checked_add(jiff::SignedDuration::from_secs(seconds)).map_err(ApiError::internal)?;
        let spec = request.map_mut("spec");
        spec.insert("audiences".into(), json!(audiences));
        spec.insert("expirationSeconds".into(), seconds.into());
        spec.entry("boundObjectRef").or_insert(Value::Null);
        request.0.insert("apiVersion".into(), json!("authentication.k8s.io/v1"));
        request.0.insert("kind".into(), json!("TokenRequest"));
        request
            .0
            .insert("status".into(), json!({"token": token, "expirationTimestamp": meta::timestamp(until)}));
        let meta = request.meta_mut();
        meta.insert("name".into(), name.into());
        meta.insert("namespace".into(), namespace.into());
        meta.insert("creationTimestamp".into(), meta::timestamp(now));
        Ok(request)
    }

    /// Kind, name and uid of the object that a token is bound to.
    fn bound_object(
        &self,
        namespace: &str,
        reference: &Value,
    ) -> Result<Option<(String, String, String)>, ApiError> {
        if !reference.is_object() {
            return Ok(None);
        }
        let text = |field: &str| reference[field].as_str().unwrap_or("");
        let (plural, within) = match text("kind") {
            "Pod" => ("pods", namespace),
            "Secret" => ("secrets", namespace),
            "Node" => ("nodes", ""),
            other => {
                return Err(ApiError::bad_request(format!(
                    "cannot bind token for serviceaccount to object of type {:?}, Kind={other}",
                    text("apiVersion")
                )));
            }
        };
        let kind = registry().find("", "v1", plural).ok_or_else(ApiError::no_resource)?;
        let entry = load(&self.store, kind, &key(kind, within, text("name")))?;
        let object = Object::from_entry(&entry).map_err(ApiError::internal)?;
        if !text("uid").is_empty() && text("uid") != object.uid() {
            let why = format!(
                "the UID in the bound object reference ({}) does not match the UID in record. The object might have been deleted and then recreated",
                text("uid")
            );
            return Err(ApiError::conflict(kind, text("name"), &why));
        }
        Ok(Some((text("kind").to_owned(), text("name").to_owned(), object.uid().to_owned())))
    }
}

fn texts(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(|one| one.as_str().map(str::to_owned)).collect()
}

/// Checks the duration; the messages are upstream's (`ValidateTokenRequest`).
fn check_token_spec(seconds: i64) -> Result<(), ApiError> {
    let mut errors = Vec::new();
    let path = "spec.expirationSeconds";
    if seconds < EXPIRATION_SECONDS_MIN {
        errors.push(FieldError::invalid(path, seconds, "may not specify a duration less than 10 minutes"));
    }
    if seconds > EXPIRATION_SECONDS_MAX {
        errors.push(FieldError::invalid(
            path,
            seconds,
            "may not specify a duration larger than 2^32 seconds",
        ));
    }
    if errors.is_empty() {
        return Ok(());
    }
    Err(ApiError::invalid_named("authentication.k8s.io", "TokenRequest", "", &errors))
}

fn user_info(user: &User) -> Value {
    let mut info = json!({"username": user.name, "groups": user.groups});
    if !user.uid.is_empty() {
        info["uid"] = user.uid.as_str().into();
    }
    if !user.extra.is_empty() {
        info["extra"] = json!(user.extra);
    }
    info
}

/// The user that a SubjectAccessReview is about.
fn subject(spec: &Value) -> User {
    User::named(spec["user"].as_str().unwrap_or(""), texts(&spec["groups"]))
}

fn check_access_spec(kind: &Kind, spec: &Value, with_subject: bool) -> Result<(), ApiError> {
    let (resource, path) =
        (spec["resourceAttributes"].is_object(), spec["nonResourceAttributes"].is_object());
    let mut errors = Vec::new();
    if resource && path {
        let detail = "cannot be specified in combination with resourceAttributes";
        errors.push(FieldError::invalid("spec.nonResourceAttributes", "{}", detail));
    }
    if !resource && !path {
        let detail = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
        errors.push(FieldError::invalid("spec.resourceAttributes", "null", detail));
    }
    if with_subject && spec["user"].as_str().unwrap_or("").is_empty() && texts(&spec["groups"]).is_empty() {
        errors.push(FieldError::invalid(
            "spec.user",
            "\"\"",
            "at least one of user or group must be specified",
        ));
    }
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(kind, "", &errors)) }
}
