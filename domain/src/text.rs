//! Values whose form in texts, and in JSON, is a word or a text of their own.

/// Serialises by `Display`, and deserialises by `FromStr`, whose error it hands on.
macro_rules! serde_as_text {
    ($name:ty) => {
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                <String as serde::Deserialize>::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}
pub(crate) use serde_as_text;

/// An enum whose values each have a word, by which texts name them and by which they are stored, counted and shown.
#[macro_export]
macro_rules! words {
    ($(#[$doc:meta])* $visibility:vis enum $name:ident { $($(#[$vdoc:meta])* $variant:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        $visibility enum $name {
            $($(#[$vdoc])* $variant),+
        }

        impl $name {
            /// Every value, in one fixed order.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// Their words.
            pub const WORDS: &'static [&'static str] = &[$($word),+];

            /// Its word, as texts have it.
            pub const fn as_str(self) -> &'static str {
                Self::WORDS[self as usize]
            }
        }
    };
}
