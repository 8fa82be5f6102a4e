"""What answers are made of, choice by choice, before they have a form."""
