//! Leases.

use k8s_openapi::api::coordination::v1::Lease;
use mayfly_api::validation::FieldError;
use serde_json::Value;

use super::{AGE, Column, Kind, NAME, print};

pub(super) fn kinds() -> Vec<Kind> {
    vec![Kind {
        status: false,
        unconditional_update: false,
        create_on_update: true,
        columns: const {
            &[
                NAME,
                Column::text(
                    "Holder",
                    "holderIdentity contains the identity of the holder of a current lease.",
                ),
                AGE,
            ]
        },
        cells: |object, now| {
            let holder = object.str_at(&["spec", "holderIdentity"]);
            vec![object.name().into(), holder.into(), print::age(object, now)]
        },
        validate: |new, _| {
            let mut errors = Vec::new();
            let number = |field: &str| new.at(&["spec", field]).and_then(Value::as_i64);
            if let Some(seconds) = number("leaseDurationSeconds").filter(|seconds| *seconds <= 0) {
                let path = "spec.leaseDurationSeconds";
                errors.push(FieldError::invalid(path, seconds, "must be greater than 0"));
            }
            if let Some(count) = number("leaseTransitions").filter(|count| *count < 0) {
                let detail = "must be greater than or equal to 0";
                errors.push(FieldError::invalid("spec.leaseTransitions", count, detail));
            }
            errors
        },
        ..Kind::built_in::<Lease>("lease")
    }]
}
