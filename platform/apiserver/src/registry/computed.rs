//! ComponentStatuses and APIServices, which [`crate::computed`] answers from the state of the server, and the older
//! form of a pod's binding.

use k8s_openapi::{
    api::core::v1::{Binding, ComponentStatus},
    kube_aggregator::pkg::apis::apiregistration::v1::APIService,
};

use super::{AGE, Backing, Column, Kind, NAME, print, verb_sets};

pub(super) fn kinds() -> Vec<Kind> {
    vec![component_status(), api_service(), binding()]
}

fn component_status() -> Kind {
    Kind {
        short_names: &["cs"],
        columns: const {
            &[
                NAME,
                Column::text("Status", "Status of the component conditions"),
                Column::text("Message", "Message of the component conditions"),
                Column::text("Error", "Error of the component conditions"),
            ]
        },
        cells: |object, _| {
            let healthy = print::items(object, &["conditions"]).find(|one| one["type"] == "Healthy");
            let text = |field: &str| healthy.and_then(|one| one[field].as_str()).unwrap_or("");
            let status = match (healthy, text("status")) {
                (None, _) => "Unknown",
                (_, "True") => "Healthy",
                _ => "Unhealthy",
            };
            vec![object.name().into(), status.into(), text("message").into(), text("error").into()]
        },
        ..base(Kind::built_in::<ComponentStatus>("componentstatus"))
    }
}

fn api_service() -> Kind {
    Kind {
        categories: &["api-extensions"],
        status: true,
        columns: const {
            &[
                NAME,
                Column::text("Service", "The reference to the service that hosts this API endpoint."),
                Column::text("Available", "Whether this service is available."),
                AGE,
            ]
        },
        cells: |object, now| {
            let available = print::condition(object, "Available").map_or("Unknown", |(status, _)| status);
            vec![object.name().into(), "Local".into(), available.into(), print::age(object, now)]
        },
        ..base(Kind::built_in::<APIService>("apiservice"))
    }
}

fn base(kind: Kind) -> Kind {
    Kind { backing: Backing::Computed, verbs: verb_sets::READ, namespaced: false, status: false, ..kind }
}

fn binding() -> Kind {
    Kind {
        backing: Backing::Review,
        verbs: verb_sets::CREATE,
        status: false,
        on_create: |_| {},
        ..Kind::built_in::<Binding>("binding")
    }
}
