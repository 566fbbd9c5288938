//! Enums whose values each have a text, by which they are stored, counted and shown.

macro_rules! labels {
    ($(#[$doc:meta])* $visibility:vis enum $name:ident { $($(#[$value_doc:meta])* $value:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        $visibility enum $name {
            $($(#[$value_doc])* $value,)+
        }

        #[allow(dead_code)]
        impl $name {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$value),+];

            /// Its text.
            pub const fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $text,)+
                }
            }
        }
    };
}
pub(crate) use labels;
