// The matrices that a device of this tier multiplies: operands of f16, sums of f32.
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sum = coop_mat16x16<f32, C>;
