//! The iteration order of a Java `HashMap` with string keys.
//!
//! It is visible wherever AWS builds an object from such a map and serialises it: in payload templates and in
//! `States.JsonMerge`.

/// Sorts entries as a `HashMap` iterates over them after inserting them in this order.
pub(crate) fn sorted<T>(entries: Vec<T>, key: impl Fn(&T) -> &str) -> Vec<T> {
    let mut entries: Vec<(u32, T)> = entries.into_iter().map(|entry| (spread(key(&entry)), entry)).collect();
    let buckets = buckets(entries.len());
    // A stable sort: entries of one bucket keep their order.
    entries.sort_by_key(|(hash, _)| hash & (buckets - 1));
    entries.into_iter().map(|(_, entry)| entry).collect()
}

/// The number of buckets: 16 initially, doubled when the map is more than three quarters full.
fn buckets(len: usize) -> u32 {
    let mut buckets: u32 = 16;
    while len as u64 * 4 > u64::from(buckets) * 3 && buckets < 1 << 30 {
        buckets *= 2;
    }
    buckets
}

/// `String.hashCode`, with the upper half mixed in as `HashMap.hash` does.
fn spread(key: &str) -> u32 {
    let hash =
        key.encode_utf16().fold(0_u32, |hash, unit| hash.wrapping_mul(31).wrapping_add(u32::from(unit)));
    hash ^ (hash >> 16)
}

#[cfg(test)]
mod tests {
    #[test]
    fn keys_come_as_recorded() {
        for (written, told) in [
            // test-map-state-parameters-singleton-legacy
            (
                "original_input iteration_input_value iteration_index from_input_constant",
                "iteration_input_value from_input_constant iteration_index original_input",
            ),
            // test-start-execution-no-such-arn
            ("StateMachineArn Input Name", "Input StateMachineArn Name"),
            // test-assign-from-value-BASE-ASSIGN-FROM-INTRINSIC-FUNCTION
            (
                "simpleArray partitionedArray containsElement numberRange thirdElement arraySize uniqueValues",
                "uniqueValues simpleArray thirdElement partitionedArray arraySize containsElement numberRange",
            ),
            // test-query-runtime-memory: more than twelve, so the table has grown
            (
                "context_object execution execution_id execution_input execution_name execution_rolearn \
                 execution_starttime state state_enteredtime state_name statemachine statemachine_id \
                 statemachine_name",
                "execution execution_rolearn execution_name statemachine_id execution_id execution_input \
                 execution_starttime state_name state_enteredtime statemachine state context_object \
                 statemachine_name",
            ),
        ] {
            let written: Vec<&str> = written.split_whitespace().collect();
            let told: Vec<&str> = told.split_whitespace().collect();
            assert_eq!(super::sorted(written, |key| key), told);
        }
    }
}
