#!/bin/sh
sed -i "s/range(n - 1)/range(n)/" numbers_of.py
