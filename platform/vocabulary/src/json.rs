//! Reads JSON, or YAML, into a type of one's own: [`read`] calls the constructors of a [`JsonTree`].
//!
//! `serde_json::Value` sorts the members of objects and drops duplicate ones. The types that keep them differ in what
//! they keep; the walk over the input is the same.

use std::{fmt, marker::PhantomData};

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

/// A type with a value for each JSON value.
pub trait JsonTree: Sized {
    /// An array while it is read.
    type Items: Default;
    /// An object while it is read.
    type Members: Default;

    /// `null`.
    fn from_null() -> Self;
    /// `true` or `false`.
    fn from_bool(flag: bool) -> Self;
    /// A whole number below 2⁶³.
    fn from_signed(number: i64) -> Self;
    /// A whole number of at least 0; the input decides between this and [`Self::from_signed`].
    fn from_unsigned(number: u64) -> Self;
    /// Another number.
    ///
    /// # Errors
    /// The type has no such number: the reason.
    fn from_double(number: f64) -> Result<Self, String>;
    /// A string that is borrowed from the input.
    fn from_text(text: &str) -> Self;
    /// A string that the input gives away.
    fn from_string(text: String) -> Self {
        Self::from_text(&text)
    }
    /// Adds the next item.
    fn push(items: &mut Self::Items, item: Self);
    /// The array, after its last item.
    fn from_items(items: Self::Items) -> Self;
    /// Adds the next member; a name may come more than once.
    fn insert(members: &mut Self::Members, name: String, value: Self);
    /// The object, after its last member.
    fn from_members(members: Self::Members) -> Self;
}

/// Reads one value: the body of an implementation of [`serde::Deserialize`].
///
/// # Errors
/// Those of the input, and of [`JsonTree::from_double`].
pub fn read<'de, T: JsonTree, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
    JsonVisitor::<T>::new().deserialize(deserializer)
}

struct JsonVisitor<T>(PhantomData<T>);

impl<T> JsonVisitor<T> {
    fn new() -> Self {
        Self(PhantomData)
    }
}

impl<'de, T: JsonTree> DeserializeSeed<'de> for JsonVisitor<T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: JsonTree> Visitor<'de> for JsonVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(T::from_null())
    }

    fn visit_none<E>(self) -> Result<T, E> {
        Ok(T::from_null())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_bool<E>(self, flag: bool) -> Result<T, E> {
        Ok(T::from_bool(flag))
    }

    fn visit_i64<E>(self, number: i64) -> Result<T, E> {
        Ok(T::from_signed(number))
    }

    fn visit_u64<E>(self, number: u64) -> Result<T, E> {
        Ok(T::from_unsigned(number))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        T::from_double(number).map_err(E::custom)
    }

    fn visit_str<E>(self, text: &str) -> Result<T, E> {
        Ok(T::from_text(text))
    }

    fn visit_string<E>(self, text: String) -> Result<T, E> {
        Ok(T::from_string(text))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<T, A::Error> {
        let mut items = T::Items::default();
        while let Some(item) = seq.next_element_seed(Self::new())? {
            T::push(&mut items, item);
        }
        Ok(T::from_items(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut members = T::Members::default();
        while let Some(name) = map.next_key()? {
            let value = map.next_value_seed(Self::new())?;
            T::insert(&mut members, name, value);
        }
        Ok(T::from_members(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The calls of the constructors, as text.
    struct Calls(String);

    impl JsonTree for Calls {
        type Items = String;
        type Members = String;

        fn from_null() -> Self {
            Self("null".into())
        }
        fn from_bool(flag: bool) -> Self {
            Self(flag.to_string())
        }
        fn from_signed(number: i64) -> Self {
            Self(format!("i{number}"))
        }
        fn from_unsigned(number: u64) -> Self {
            Self(format!("u{number}"))
        }
        fn from_double(number: f64) -> Result<Self, String> {
            match number > 1e300 {
                true => Err(format!("{number:e} is too large")),
                false => Ok(Self(format!("f{number}"))),
            }
        }
        fn from_text(text: &str) -> Self {
            Self(format!("'{text}'"))
        }
        fn push(items: &mut String, item: Self) {
            *items += &format!("{} ", item.0);
        }
        fn from_items(items: String) -> Self {
            Self(format!("[{items}]"))
        }
        fn insert(members: &mut String, name: String, value: Self) {
            *members += &format!("{name}={} ", value.0);
        }
        fn from_members(members: String) -> Self {
            Self(format!("{{{members}}}"))
        }
    }

    fn calls(text: &str) -> Result<String, String> {
        let read: Result<Calls, _> = read(&mut serde_json::Deserializer::from_str(text));
        read.map(|calls| calls.0).map_err(|error| error.to_string())
    }

    #[test]
    fn members_come_in_the_order_of_the_input_and_more_than_once() {
        let text = r#"{"b": [1, -2, 1.5, "x", "\n", null, true], "a": {}, "b": []}"#;
        assert_eq!(calls(text).unwrap(), "{b=[u1 i-2 f1.5 'x' '\n' null true ] a={} b=[] }");
    }

    #[test]
    fn numbers_that_the_type_does_not_have_are_errors() {
        assert!(calls("[1e301]").unwrap_err().contains("1e301 is too large"));
        assert!(calls("[1").is_err());
    }
}
