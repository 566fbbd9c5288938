//! How values are selected: exact cuts, the search of MSTopk, and the definitions that tests compare with.

pub(crate) mod cut;
pub(crate) mod filter;
pub(crate) mod mstopk;
pub mod naive;
pub(crate) mod topk;
