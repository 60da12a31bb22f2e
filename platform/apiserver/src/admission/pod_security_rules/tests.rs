use serde_json::json;

use super::*;

fn check(level: SecurityLevel, spec: Value, expected: &[&str]) {
    let found: Vec<_> = violations(level, &json!({}), &spec)
        .into_iter()
        .map(|violation| format!("{} ({})", violation.reason, violation.detail))
        .collect();
    assert_eq!(found, expected, "{spec}");
}

#[test]
fn a_plain_container_is_baseline_but_not_restricted() {
    let spec = json!({"containers": [{"name": "c"}]});
    check(SecurityLevel::Baseline, spec.clone(), &[]);
    check(
        SecurityLevel::Restricted,
        spec,
        &[
            "allowPrivilegeEscalation != false (container \"c\" must set securityContext.allowPrivilegeEscalation=false)",
            "unrestricted capabilities (container \"c\" must set securityContext.capabilities.drop=[\"ALL\"])",
            "runAsNonRoot != true (pod or container \"c\" must set securityContext.runAsNonRoot=true)",
            "seccompProfile (pod or container \"c\" must set securityContext.seccompProfile.type to \"RuntimeDefault\" or \"Localhost\")",
        ],
    );
    let context = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}});
    let good = json!({"securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [{"name": "c", "securityContext": context}],
        "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "projected": {}}]});
    check(SecurityLevel::Restricted, good, &[]);
}

#[test]
fn baseline_refuses_the_host() {
    let spec = json!({"hostNetwork": true, "hostPID": true,
        "securityContext": {"sysctls": [{"name": "kernel.shm_rmid_forced"}, {"name": "kernel.msgmax"}],
            "windowsOptions": {"hostProcess": true}, "seLinuxOptions": {"type": "x", "user": "u"}},
        "initContainers": [{"name": "i", "ports": [{"hostPort": 80}, {"hostPort": 0}]}],
        "containers": [
            {"name": "a", "securityContext": {"privileged": true, "capabilities": {"add": ["NET_ADMIN", "KILL"]}}},
            {"name": "b", "securityContext": {"privileged": true, "procMount": "Unmasked",
                "seccompProfile": {"type": "Unconfined"}, "appArmorProfile": {"type": "Unconfined"}}}],
        "volumes": [{"name": "h", "hostPath": {"path": "/"}}]});
    let expected = [
        "forbidden AppArmor profile (container \"b\" must not set AppArmor profile type to \"Unconfined\")",
        "non-default capabilities (container \"a\" must not include \"NET_ADMIN\" in securityContext.capabilities.add)",
        "host namespaces (hostNetwork=true, hostPID=true)",
        "hostPath volumes (volume \"h\")",
        "hostPort (container \"i\" uses hostPort 80)",
        "privileged (containers \"a\", \"b\" must not set securityContext.privileged=true)",
        "procMount (container \"b\" must not set securityContext.procMount to \"Unmasked\")",
        "seLinuxOptions (pod set forbidden securityContext.seLinuxOptions: type \"x\"; user may not be set)",
        "seccompProfile (container \"b\" must not set securityContext.seccompProfile.type to \"Unconfined\")",
        "forbidden sysctls (kernel.msgmax)",
        "hostProcess (pod must not set securityContext.windowsOptions.hostProcess=true)",
    ];
    check(SecurityLevel::Baseline, spec.clone(), &expected);
    check(SecurityLevel::Privileged, spec, &[]);
}

#[test]
fn restricted_replaces_rules_of_baseline() {
    let context = json!({"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"], "add": ["KILL"]},
        "runAsNonRoot": false, "runAsUser": 0, "seccompProfile": {"type": "Unconfined"}});
    let spec = json!({"containers": [{"name": "a", "securityContext": context}],
        "volumes": [{"name": "h", "hostPath": {"path": "/"}}, {"name": "n", "nfs": {}}]});
    check(
        SecurityLevel::Restricted,
        spec,
        &[
            "unrestricted capabilities (container \"a\" must not include \"KILL\" in securityContext.capabilities.add)",
            "restricted volume types (volumes \"h\", \"n\" use restricted volume types \"hostPath\", \"nfs\")",
            "runAsNonRoot != true (container \"a\" must not set securityContext.runAsNonRoot=false)",
            "runAsUser=0 (container \"a\" must not set runAsUser=0)",
            "seccompProfile (container \"a\" must not set securityContext.seccompProfile.type to \"Unconfined\")",
        ],
    );
}
