//! ValidatingAdmissionPolicies, and conditions of webhooks.

use http::StatusCode;
use serde_json::{Value, json};

use crate::support::Fixture;

const GROUP: &str = "/apis/admissionregistration.k8s.io/v1";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// Registers the policy `p` about writes of ConfigMaps, and its binding `b`.
async fn register(fixture: &Fixture, policy: Value, binding: Value) {
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"],
        "resources": ["configmaps"]});
    let mut spec = json!({"matchConstraints": {"resourceRules": [rule]}});
    json_patch::merge(&mut spec, &policy);
    let policy = json!({"metadata": {"name": "p"}, "spec": spec});
    let (code, answer) = fixture.call("POST", &format!("{GROUP}/validatingadmissionpolicies"), policy).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
    let mut spec = json!({"policyName": "p", "validationActions": ["Deny"]});
    json_patch::merge(&mut spec, &binding);
    let binding = json!({"metadata": {"name": "b"}, "spec": spec});
    let path = format!("{GROUP}/validatingadmissionpolicybindings");
    let (code, answer) = fixture.call("POST", &path, binding).await;
    assert_eq!(code, StatusCode::CREATED, "{answer}");
}

fn config_map(name: &str, data: Value) -> Value {
    json!({"metadata": {"name": name, "labels": {"team": "a"}}, "data": data})
}

/// Creates a ConfigMap; returns the code, and the message of a refusal.
async fn create(fixture: &Fixture, name: &str, data: Value) -> (u16, String) {
    let (code, answer) = fixture.call("POST", MAPS, config_map(name, data)).await;
    (code.as_u16(), answer["message"].as_str().unwrap_or("").to_owned())
}

const DENIED: &str = "is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request:";

#[tokio::test]
async fn a_policy_refuses_what_does_not_hold() {
    let fixture = Fixture::new().await;
    let policy = json!({
        "variables": [
            {"name": "keys", "expression": "has(object.data) ? size(object.data) : 0"},
            {"name": "most", "expression": "variables.keys > 5 ? 1 : 2"},
        ],
        "validations": [
            {"expression": "variables.keys <= variables.most", "messageExpression": "'too many: ' + string(variables.keys)"},
            {"expression": "object.metadata.name != 'secret'", "message": "no secrets", "reason": "Forbidden"},
            {"expression": "oldObject == null || oldObject.data == object.data"},
        ],
    });
    register(&fixture, policy, json!({})).await;
    assert_eq!(create(&fixture, "a", json!({"x": "1"})).await.0, 201);
    let (code, message) = create(&fixture, "b", json!({"x": "1", "y": "2", "z": "3"})).await;
    assert_eq!((code, message), (422, format!("configmaps \"b\" {DENIED} too many: 3")));
    let (code, message) = create(&fixture, "secret", json!({})).await;
    assert_eq!((code, message), (403, format!("configmaps \"secret\" {DENIED} no secrets")));
    let changed = config_map("a", json!({"x": "2"}));
    let (code, answer) = fixture.call("PUT", &format!("{MAPS}/a"), changed).await;
    let why = "failed expression: oldObject == null || oldObject.data == object.data";
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(answer["message"], format!("configmaps \"a\" {DENIED} {why}"));
    assert!(answer["details"]["causes"][0]["message"].as_str().unwrap().ends_with(why), "{answer}");
    // Without its binding a policy does nothing.
    fixture.call("DELETE", &format!("{GROUP}/validatingadmissionpolicybindings/b"), Value::Null).await;
    assert_eq!(create(&fixture, "secret", json!({})).await.0, 201);
}

#[tokio::test]
async fn a_binding_may_warn_and_selects_by_labels() {
    let fixture = Fixture::new().await;
    let policy = json!({"validations": [{"expression": "has(object.data)", "message": "no data"}]});
    let selector = json!({"objectSelector": {"matchLabels": {"team": "a"}}});
    let binding = json!({"validationActions": ["Warn", "Audit"], "matchResources": selector});
    register(&fixture, policy, binding).await;
    let request = crate::support::request("POST", MAPS)
        .header("content-type", "application/json")
        .body(config_map("a", Value::Null).to_string().into())
        .unwrap();
    let response = fixture.send(request).await;
    assert_eq!(response.status(), StatusCode::CREATED);
    let warning = response.headers().get("warning").unwrap().to_str().unwrap();
    let expected = "Validation failed for ValidatingAdmissionPolicy 'p' with binding 'b': no data";
    assert_eq!(warning, format!("299 - \"{expected}\""));
    let other = json!({"metadata": {"name": "b", "labels": {"team": "b"}}});
    let request = crate::support::request("POST", MAPS)
        .header("content-type", "application/json")
        .body(other.to_string().into())
        .unwrap();
    assert!(fixture.send(request).await.headers().get("warning").is_none(), "it is not selected");
}

#[tokio::test]
async fn conditions_restrict_a_policy_and_the_failure_policy_decides_about_errors() {
    for (policy, expected) in [
        ("Fail", (422, "expression 'object.data.size == \"1\"' resulted in error: no such key: size")),
        ("Ignore", (201, "")),
    ] {
        let fixture = Fixture::new().await;
        let spec = json!({
            "failurePolicy": policy,
            "matchConditions": [{"name": "big", "expression": "object.metadata.name.startsWith('big')"}],
            "validations": [{"expression": "object.data.size == \"1\""}],
        });
        register(&fixture, spec, json!({})).await;
        assert_eq!(create(&fixture, "small", json!({"x": "1"})).await.0, 201);
        assert_eq!(create(&fixture, "big-1", json!({"size": "1"})).await.0, 201);
        let (code, message) = create(&fixture, "big-2", json!({"x": "1"})).await;
        assert_eq!(code, expected.0, "{policy}: {message}");
        assert!(message.ends_with(expected.1), "{policy}: {message}");
    }
}

#[tokio::test]
async fn parameters_are_objects_that_the_binding_names() {
    let fixture = Fixture::new().await;
    let policy = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"},
        "matchConditions": [{"name": "no-parameters", "expression": "!object.metadata.name.startsWith('limits')"}],
        "validations": [{"expression": "!has(object.data) || size(object.data) <= int(params.data.most)"}],
    });
    let reference = json!({"name": "limits", "parameterNotFoundAction": "Deny"});
    register(&fixture, policy, json!({"paramRef": reference})).await;
    let (code, message) = create(&fixture, "a", json!({})).await;
    let why =
        "failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction";
    assert_eq!((code, message), (422, format!("configmaps \"a\" {DENIED} {why}")));
    // The policy concerns its own parameters, too, so it is bound after they exist.
    let binding = format!("{GROUP}/validatingadmissionpolicybindings/b");
    fixture.call("DELETE", &binding, Value::Null).await;
    assert_eq!(create(&fixture, "limits", json!({"most": "1"})).await.0, 201);
    let spec = json!({"policyName": "p", "validationActions": ["Deny"], "paramRef": reference});
    let path = format!("{GROUP}/validatingadmissionpolicybindings");
    fixture.call("POST", &path, json!({"metadata": {"name": "b"}, "spec": spec})).await;
    assert_eq!(create(&fixture, "a", json!({"x": "1"})).await.0, 201);
    assert_eq!(create(&fixture, "b", json!({"x": "1", "y": "2"})).await.0, 422);
}

#[tokio::test]
async fn a_deletion_is_checked_and_subresources_are_named() {
    let fixture = Fixture::new().await;
    let rules = json!([
        {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["DELETE"], "resources": ["configmaps"]},
        {"apiGroups": ["apps"], "apiVersions": ["v1"], "operations": ["UPDATE"], "resources": ["deployments/scale"]},
    ]);
    let policy = json!({
        "matchConstraints": {"resourceRules": rules},
        "validations": [
            {"expression": "request.operation != 'DELETE' || oldObject.metadata.name != 'kept'", "message": "kept"},
            {"expression": "object == null || object.spec.replicas < 5", "message": "too large"},
        ],
    });
    register(&fixture, policy, json!({})).await;
    create(&fixture, "kept", json!({})).await;
    let (code, answer) = fixture.call("DELETE", &format!("{MAPS}/kept"), Value::Null).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
    assert_eq!(answer["message"], format!("configmaps \"kept\" {DENIED} kept"));
    let template =
        json!({"metadata": {"labels": {"app": "a"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let deployment = json!({"metadata": {"name": "d"}, "spec": {"replicas": 9, "selector": {"matchLabels": {"app": "a"}},
        "template": template}});
    let path = "/apis/apps/v1/namespaces/default/deployments";
    let (code, answer) = fixture.call("POST", path, deployment).await;
    assert_eq!(code, StatusCode::CREATED, "the policy is about the scale alone: {answer}");
    let scale = |replicas: i32| json!({"metadata": {"name": "d"}, "spec": {"replicas": replicas}});
    let (code, answer) = fixture.call("PUT", &format!("{path}/d/scale"), scale(6)).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
    assert_eq!(answer["message"], format!("deployments.apps \"d\" {DENIED} too large"));
    let (code, answer) = fixture.call("PUT", &format!("{path}/d/scale"), scale(3)).await;
    assert_eq!((code, &answer["spec"]["replicas"]), (StatusCode::OK, &json!(3)));
}

/// Creates a ConfigMap as another user; returns the code, and the message of a refusal.
async fn create_as(fixture: &Fixture, user: &str, name: &str) -> (u16, String) {
    let request = crate::support::request("POST", MAPS)
        .header("content-type", "application/json")
        .header("impersonate-user", user)
        .body(config_map(name, json!({})).to_string().into())
        .unwrap();
    let (code, answer) = crate::support::json_of(fixture.send(request).await).await;
    (code.as_u16(), answer["message"].as_str().unwrap_or("").to_owned())
}

/// Users `ada`, `bob` and the service account `default/robot` may create ConfigMaps; ada may do more.
async fn with_roles() -> Fixture {
    let fixture = Fixture::new().await;
    const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
    let rule = |group: &str, resource: &str, verbs: &[&str]| json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    let named = json!({"apiGroups": [""], "resources": ["pods"], "resourceNames": ["one"], "verbs": ["get"]});
    let roles = [
        (
            "writer",
            json!([rule("", "configmaps", &["create"])]),
            &["ada", "bob", "system:serviceaccount:default:robot"][..],
        ),
        (
            "more",
            json!([named, rule("apps", "deployments/scale", &["update"]), rule("", "configmaps", &["delete"]),
                   {"nonResourceURLs": ["/special/*"], "verbs": ["get"]}]),
            &["ada"],
        ),
    ];
    for (name, rules, users) in roles {
        let role = json!({"metadata": {"name": name}, "rules": rules});
        let subjects: Vec<_> = users
            .iter()
            .map(|user| json!({"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}))
            .collect();
        let binding = json!({"metadata": {"name": name}, "subjects": subjects,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}});
        for (plural, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
            let (code, answer) = fixture.call("POST", &format!("{RBAC}/{plural}"), object).await;
            assert_eq!(code, StatusCode::CREATED, "{answer}");
        }
    }
    fixture
}

#[tokio::test]
async fn a_policy_asks_the_authorizer_about_the_user() {
    const NAMED: &str =
        "authorizer.group('').resource('pods').namespace('x').name('one').check('get').allowed()";
    const SCALE: &str =
        "authorizer.group('apps').resource('deployments').subresource('scale').check('update').allowed()";
    const SELECTED: &str = "authorizer.group('').resource('pods').name('one').fieldSelector('spec.nodeName=n')\
                            .labelSelector('a=b').check('get').allowed()";
    const ROBOT: &str = "authorizer.serviceAccount('default', 'robot').group('').resource('configmaps')";
    for (expression, ada, bob) in [
        (NAMED.to_owned(), true, false),
        (NAMED.replace("'one'", "'two'"), false, false),
        (SCALE.to_owned(), true, false),
        (SCALE.replace(".subresource('scale')", ""), false, false),
        (SELECTED.to_owned(), true, false),
        ("authorizer.path('/special/a').check('get').allowed()".to_owned(), true, false),
        ("authorizer.requestResource.check('create').allowed()".to_owned(), true, true),
        ("authorizer.requestResource.check('delete').allowed()".to_owned(), true, false),
        (format!("{ROBOT}.namespace('default').check('create').allowed()"), true, true),
        (format!("{ROBOT}.check('delete').allowed()"), false, false),
        ("!authorizer.path('/other').check('get').errored()".to_owned(), true, true),
        ("authorizer.path('/other').check('get').error() == ''".to_owned(), true, true),
        (
            "authorizer.path('/special/a').check('get').reason().contains('ClusterRoleBinding \"more\"')"
                .to_owned(),
            true,
            false,
        ),
        // A failed evaluation refuses the write.
        ("authorizer.path(' ').check('get').allowed()".to_owned(), false, false),
        (
            "authorizer.serviceAccount('default', 'No').path('/').check('get').allowed()".to_owned(),
            false,
            false,
        ),
        ("authorizer.group('').check('get').allowed()".to_owned(), false, false),
    ] {
        let fixture = with_roles().await;
        register(&fixture, json!({"validations": [{"expression": expression}]}), json!({})).await;
        for (user, expected) in [("ada", ada), ("bob", bob)] {
            let (code, message) = create_as(&fixture, user, user).await;
            assert_eq!(code, if expected { 201 } else { 422 }, "{expression} for {user}: {message}");
        }
    }
}

#[tokio::test]
async fn conditions_and_variables_have_the_authorizer_but_messages_do_not() {
    let fixture = with_roles().await;
    let policy = json!({
        "matchConditions": [{"name": "not-special", "expression": "!authorizer.path('/special/').check('get').allowed()"}],
        "variables": [{"name": "mayDelete", "expression": "authorizer.requestResource.check('delete').allowed()"}],
        "validations": [{"expression": "variables.mayDelete", "message": "may not delete"}],
    });
    register(&fixture, policy, json!({})).await;
    assert_eq!(create_as(&fixture, "ada", "a").await.0, 201);
    assert_eq!(
        create_as(&fixture, "bob", "b").await,
        (422, format!("configmaps \"b\" {DENIED} may not delete"))
    );
    // Members of `system:masters` may do everything.
    assert_eq!(create(&fixture, "c", json!({})).await.0, 201);
    let rule =
        json!({"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]});
    let validation =
        json!({"expression": "true", "messageExpression": "authorizer.path('/').check('get').reason()"});
    let policy = json!({"metadata": {"name": "q"},
        "spec": {"matchConstraints": {"resourceRules": [rule]}, "validations": [validation]}});
    let (code, answer) = fixture.call("POST", &format!("{GROUP}/validatingadmissionpolicies"), policy).await;
    assert_eq!(code, StatusCode::UNPROCESSABLE_ENTITY, "{answer}");
    let message = answer["message"].as_str().unwrap();
    assert!(message.contains("undeclared reference to 'authorizer' (in container '')"), "{message}");
}
